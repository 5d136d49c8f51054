import pytest

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.reach.proxies import Proxies, Proxy, proxies_of

PROXY = Proxy("http", "proxy", 3128, "me", "s3cret")


@pytest.mark.parametrize(
    ("environment", "proxies"),
    [
        ({}, Proxies()),
        ({"HTTPS_PROXY": "http://me:s3cret@proxy:3128"}, Proxies(https=PROXY)),
        ({"https_proxy": "http://me:s3cret@proxy:3128", "HTTPS_PROXY": "other"}, Proxies(https=PROXY)),
        ({"all_proxy": "http://me:s3cret@proxy:3128"}, Proxies(every=PROXY)),
        ({"HTTP_PROXY": "http://proxy:1", "HTTPS_PROXY": ""}, Proxies()),
        ({"NO_PROXY": "a.org, .b.org 10.0.0.0/8,"}, Proxies(exempt=("a.org", ".b.org", "10.0.0.0/8"))),
    ],
)
def test_the_environment_names_proxies_as_it_does_for_curl(
    environment: dict[str, str], proxies: Proxies
) -> None:
    assert proxies_of(environment) == proxies


@pytest.mark.parametrize("text", ["http://me:s3cret@proxy:99999", "http://", "http://me:s3cret@[x", "a b"])
def test_a_malformed_proxy_is_a_usage_error_that_shows_no_password(text: str) -> None:
    with pytest.raises(Failure, match="ALL_PROXY names no proxy") as caught:
        proxies_of({"ALL_PROXY": text})

    assert (caught.value.exit, "s3cret" in str(caught.value)) == (2, False)
