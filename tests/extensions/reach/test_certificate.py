"""The certificate of `cocktail relay --tls-cert`: read at the start, and again when it was renewed."""

import os
from pathlib import Path

import pytest
from tls_only import CERTIFICATE, KEY

from cocktail_cli.extensions.reach.relay_server import Certificate, CertificateError


def test_a_renewed_certificate_is_read_and_a_broken_one_told_while_the_old_one_serves(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(CERTIFICATE.read_bytes())
    key.write_bytes(KEY.read_bytes())
    certificate = Certificate(cert, key)
    context = certificate.context

    assert certificate.renewed() == ""
    cert.write_text("half a file")
    os.utime(cert, (1, 1))
    assert "not a certificate" in certificate.renewed()
    cert.unlink()
    assert "no such file" in certificate.renewed()
    cert.write_bytes(CERTIFICATE.read_bytes())
    os.utime(cert, (2, 2))
    assert certificate.renewed() == ""
    assert certificate.context is context, "connections to come get the renewed one"


@pytest.mark.parametrize(("cert", "key"), [(KEY, KEY), (CERTIFICATE, CERTIFICATE), (CERTIFICATE, Path("/"))])
def test_what_is_no_certificate_with_its_key_is_an_error(cert: Path, key: Path) -> None:
    with pytest.raises(CertificateError):
        Certificate(cert, key)
