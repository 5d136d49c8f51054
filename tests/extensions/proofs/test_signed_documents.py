import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocktail_cli.extensions.proofs.signed_documents import NotGenuine, SignedDocument, signer_of
from transport.protocol import RunKeys

SECRET = RunKeys.generate().signing
DOCUMENT = SignedDocument.sign("seal", {"run": "toy", "files": {"a b": "00"}}, SECRET)


def test_a_document_says_who_signed_it() -> None:
    found = SignedDocument.parse(DOCUMENT.text(), "seal")

    assert found == DOCUMENT
    assert found.statement["signer"] == signer_of(SECRET)


@given(st.integers(0, len(DOCUMENT.text()) - 1), st.integers(1, 127))
def test_any_altered_byte_of_a_document_is_found(at: int, flip: int) -> None:
    data = bytearray(DOCUMENT.text().encode())
    data[at] ^= flip

    with pytest.raises(NotGenuine):
        SignedDocument.parse(data.decode(), "seal")


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '"seal"', "[" * 100_000, '{"kind": "seal"}'])
def test_a_file_that_is_no_document_is_told_so(text: str) -> None:
    with pytest.raises(NotGenuine, match="it is no seal"):
        SignedDocument.parse(text, "seal")


def test_a_document_signed_by_another_key_does_not_pass_for_the_first_signer() -> None:
    forged = SignedDocument("seal", DOCUMENT.statement, SignedDocument.sign("seal", {}, SECRET).signature)
    other = SignedDocument.sign("seal", DOCUMENT.statement, RunKeys.generate().signing)

    with pytest.raises(NotGenuine, match="does not belong"):
        forged.check()
    assert other.statement["signer"] != signer_of(SECRET)


def test_a_document_of_one_kind_is_none_of_another() -> None:
    renamed = re.sub('"seal"', '"receipt"', DOCUMENT.text())

    with pytest.raises(NotGenuine, match="it is no receipt, but 'seal'"):
        SignedDocument.parse(DOCUMENT.text(), "receipt")
    with pytest.raises(NotGenuine, match="does not belong"):
        SignedDocument.parse(renamed, "receipt")
