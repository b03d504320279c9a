"""Certificates and keys of a federation: one authority, TLS certificates, and a key pair a hospital for its SuperNode.

All keys are EC P-384, made by the operating system's random source through `cryptography`. A SuperNode's key pair has
OpenSSH's format, which Flower reads; Flower signs every request with it. A hospital's client certificate is a second
factor that the proxy asks for, and its serial number is what the proxy knows it by.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
LEAF_DAYS = 397
CLOCK_SLACK = timedelta(minutes=10)
"""A certificate is valid a little before it is made: the hospitals' clocks may be behind."""

CLIENT, SERVER_AUTH = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


class KeyFileError(ValueError):
    """A key file that cannot be read with what was given."""


@dataclass(frozen=True)
class Authority:
    """The federation's certificate authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, passphrase: bytes | None) -> bytes:
        """The private key, encrypted where there is a passphrase."""
        return _key_pem(self.key, passphrase)


@dataclass(frozen=True)
class Leaf:
    """A certificate with its private key, both PEM."""

    certificate: bytes
    key: bytes


def new_authority(federation: str, now: datetime) -> Authority:
    """A new authority whose certificate can sign leaves and nothing below them."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name(federation, "certificate authority")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key, key.public_key(), now, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Authority(builder.add_extension(usage, critical=True).sign(key, hashes.SHA384()), key)


def load_authority(certificate: bytes, key: bytes, passphrase: bytes | None) -> Authority:
    """The authority of two PEM files. Raises KeyFileError where the passphrase is wrong, missing or not needed."""
    try:
        private = serialization.load_pem_private_key(key, passphrase)
    except (ValueError, TypeError) as error:
        raise KeyFileError(
            f"the authority's key cannot be opened ({error}); give its passphrase with --passphrase-file"
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise KeyFileError(
            "the authority's key is not an elliptic curve key; restore the folder ca/ of this federation"
        )
    loaded = x509.load_pem_x509_certificate(certificate)
    if loaded.public_key() != private.public_key():
        raise KeyFileError("ca.key does not belong to ca.crt; restore the folder ca/ from one backup")
    return Authority(loaded, private)


def issue(
    authority: Authority,
    federation: str,
    common_name: str,
    *,
    purpose: x509.ObjectIdentifier,
    hosts: Sequence[str] = (),
    now: datetime,
    days: int = LEAF_DAYS,
) -> Leaf:
    """A certificate for one purpose, `CLIENT` or `SERVER_AUTH`, with the names and addresses it is dialled under."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject, ca = _name(federation, common_name), authority.certificate
    builder = _builder(subject, ca.subject, authority.key, key.public_key(), now, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), False)
    certificate = builder.sign(authority.key, hashes.SHA384())
    return Leaf(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key, None))


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number as nginx writes it: upper-case hexadecimal, whole bytes."""
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


def new_node_key(site: str) -> tuple[bytes, bytes]:
    """A SuperNode's private and public key in OpenSSH's format; the comment of the public one is the site."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + f" {site}\n".encode()


def spki_pem(openssh_public: bytes) -> bytes:
    """An OpenSSH public key as the PEM that a SuperNode sends along with every request."""
    return serialization.load_ssh_public_key(openssh_public).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None) -> bytes:
    hiding: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        hiding = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hiding)


def _name(federation: str, common_name: str) -> x509.Name:
    parts = ((NameOID.ORGANIZATION_NAME, federation), (NameOID.COMMON_NAME, common_name))
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    # Both key identifiers: OpenSSL's strict checks, on by default from Python 3.13, refuse a chain without them.
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before((now - CLOCK_SLACK).astimezone(UTC))
        .not_valid_after((now + timedelta(days=days)).astimezone(UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _usage(**wanted: bool) -> x509.KeyUsage:
    kinds = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{kind: wanted.get(kind, False) for kind in kinds})


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
