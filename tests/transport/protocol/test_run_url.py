import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import RunURL, parse_url
from transport.protocol import UrlError, to_base64

KEY = to_base64(bytes(range(32)))
URL = RunURL(KEY, to_base64(bytes(16)), "203.0.113.7", 29400, "amber-otter-42")

hosts = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
urls = st.builds(
    RunURL,
    st.binary(min_size=32, max_size=32).map(to_base64),
    st.binary(min_size=16, max_size=16).map(to_base64),
    hosts,
    st.integers(1, 65535),
    st.from_regex(r"[a-z0-9][a-z0-9.-]{0,63}", fullmatch=True),
    st.sampled_from([(), ("place.example.org:29399",), ("[2001:db8::1]:443", "place:1")]),
)


@given(urls)
def test_a_url_survives_the_line_it_is_passed_on_as(url: RunURL) -> None:
    assert parse_url(str(url)) == url


@given(urls, st.data())
def test_a_cut_paste_is_called_incomplete(url: RunURL, data: st.DataObject) -> None:
    line = str(url)
    cut = line[: data.draw(st.integers(0, len(line) - 1))]
    try:
        parse_url(cut)
    except UrlError as error:
        told = str(error)
    else:
        pytest.fail(f"{cut} was taken for whole")

    assert "incomplete" in told or "empty" in told or "not of the form" in told


@given(urls, st.data())
def test_one_wrong_character_in_the_secrets_is_noticed(url: RunURL, data: st.DataObject) -> None:
    line = str(url)
    at = data.draw(st.integers(len("cocktail://"), line.index("@") - 1))
    other = data.draw(st.sampled_from([c for c in "abcXYZ019_" if c != line[at]]))

    with pytest.raises(UrlError):
        parse_url(line[:at] + other + line[at + 1 :])


def test_a_line_break_blanks_and_quotes_of_a_chat_are_forgiven() -> None:
    line = str(URL)

    assert parse_url(f" '{line[:60]}\n  {line[60:]}'\n") == URL


@pytest.mark.parametrize(
    "pasted", ["cocktail join {}", "$ cocktail join '{}'", "(<{}>),", "uv tool install .\ncocktail join {}"]
)
def test_the_hosts_line_may_be_pasted_whole(pasted: str) -> None:
    assert parse_url(pasted.format(URL)) == URL


def test_the_token_is_not_shown() -> None:
    assert URL.token not in repr(URL)
    assert URL.token not in URL.masked()
    assert "***" in URL.masked()


def test_the_host_may_be_edited_by_hand() -> None:
    assert parse_url(str(URL).replace("203.0.113.7", "hub.example.org")).host == "hub.example.org"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "empty"),
        ("https://example.org/x", "expected 'cocktail://'"),
        (str(URL).replace("29400", "294000"), "port"),
        (str(URL).replace("29400", "0"), "port"),
        (str(URL).replace(":29400", ""), "host:port"),
        (str(URL).replace("29400", "29400+relay.example.org"), "host:port"),
        (str(URL).replace("29400", "29400+"), "host:port"),
        (str(URL).replace("amber", "Amber"), "name"),
        (str(URL).replace(KEY, KEY[:-1]), "42 characters, expected 43"),
        (str(URL).replace(KEY, KEY[:-1] + "$"), "characters that do not belong"),
        (str(URL).split("@")[0], "incomplete"),
        (str(URL)[: len("cocktail://") + 20], "incomplete"),
        (str(URL)[:-3], "incomplete"),
    ],
)
def test_an_error_names_what_is_wrong(line: str, told: str) -> None:
    with pytest.raises(UrlError, match=told):
        parse_url(line)
