"""What went wrong with TLS, in one line that says what to do, for each of both ends."""

import ssl
from typing import Final

from infinistore.errors import TlsFailed

__all__ = ["NO_TLS_AT_CLIENT", "client_failure", "server_failure"]

_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_... of OpenSSL
_UNKNOWN_AUTHORITY: Final = (2, 18, 19, 20, 21)
_OTHER_NAME: Final = (62, 64)  # a host name, an address
_NOT_BY_RFC_5280: Final = range(80, 95)  # X509_V_FLAG_X509_STRICT, which Python sets since 3.13
NO_TLS_AT_CLIENT: Final = "this port speaks TLS, and the client does not; connect with infinistores://HOST:PORT?ca=FILE"

_REFUSED_BY_SERVER: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a certificate of the client; give cert=FILE and key=FILE",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "refused; perhaps it wants a certificate of the client: cert=FILE and key=FILE",
    "TLSV1_ALERT_UNKNOWN_CA": "does not trust this client's certificate: no authority in --tls-client-ca has signed it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused this client's certificate, which has expired; give a new one",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused this client's certificate as bad; issue another one",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refused this client's certificate; issue one for client authentication",
    "TLSV1_ALERT_PROTOCOL_VERSION": "speaks other versions of TLS; both ends need 1.2 or 1.3",
}
"""What the alert of a server means, after its name."""

_REFUSED_BY_CLIENT: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the authority of --tls-cert; it needs that in ca=FILE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that --tls-cert has expired; replace it and send SIGHUP",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client refused --tls-cert; perhaps it is not for the name that it used",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client refused --tls-cert; perhaps it is not for the name that it used",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client gave no certificate, and --tls-client-ca wants one: cert=FILE",
    "UNSUPPORTED_PROTOCOL": "the client speaks an older version than TLS 1.2",
}
"""What the alert of a client, or a check of it, means to the server."""


def client_failure(error: ssl.SSLError, peer: str) -> TlsFailed:
    """Return what an error means to the client of the server at `peer`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the certificate of {peer} {_distrust(error)}")
    if (meaning := _REFUSED_BY_SERVER.get(error.reason or "")) is not None:
        return TlsFailed(f"{peer} {meaning}")
    return TlsFailed(f"TLS with {peer} failed: {_reason(error)}")


def server_failure(error: ssl.SSLError) -> TlsFailed:
    """Return what an error means to the server."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the client's certificate was refused: {error.verify_message}; see --tls-client-ca")
    if (meaning := _REFUSED_BY_CLIENT.get(error.reason or "")) is not None:
        return TlsFailed(meaning)
    return TlsFailed(f"TLS with the client failed: {_reason(error)}")


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code == _EXPIRED:
        return "has expired; the server needs a new one in --tls-cert, and SIGHUP"
    if code == _NOT_YET_VALID:
        return "is not valid yet; compare the clocks of both hosts"
    if code in _UNKNOWN_AUTHORITY:
        return "is signed by no authority that this client trusts; give the file of its authority: ca=FILE"
    if code in _OTHER_NAME:
        return f"is for another name: {error.verify_message}; connect by a name that is in it, or issue one with this"
    if code in _NOT_BY_RFC_5280:
        return f"is not as RFC 5280 asks: {error.verify_message}; issue it again, as the page on security shows"
    return f"was refused: {error.verify_message}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
