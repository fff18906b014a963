"""TLS as an adapter of effects: what a call sends and receives reaches its driver as
ciphertext.

So there is one for all drivers, and the streams below know nothing of it.
"""

from ssl import SSLContext
from typing import Any, TypeVar

from infinistore.client.connection.effects import Call, CallEffect, Connect
from infinistore.client.connection.routing import Attempt
from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Fill, Receive, Send
from infinistore.transports.tls.session import StreamOverTls, TlsSession

_T = TypeVar("_T")


class EncryptedStream(StreamOverTls):
    """The stream of a connection over TLS. Its driver moves ciphertext: the methods and
    attributes that it uses are those of the stream below.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("inner", "session"):
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)


async def over_tls(context: SSLContext, call: Call[_T], attempt: Attempt) -> _T:
    """Run a call whose connections are encrypted, except by a Unix socket."""
    result: Any = None
    try:
        effect: CallEffect = call.send(None)
        while True:
            session: TlsSession | None = getattr(attempt.stream, "session", None)
            try:
                if isinstance(effect, Connect):
                    result, address = await effect, effect.address
                    if not address.path:
                        session = TlsSession(context, str(address), host_name=address.host)
                        result = EncryptedStream(result, session)
                elif isinstance(effect, Send) and session is not None:
                    await session.send(effect.views)
                elif isinstance(effect, Receive) and session is not None:
                    result = await session.receive_into(effect.views)
                elif isinstance(effect, Fill) and session is not None:
                    await effect.receive_by(session.receive_into)
                else:
                    result = await effect
            except StoreUnavailable as error:
                effect = call.throw(error)
            else:
                effect = call.send(result)
    except StopIteration as stop:
        done: _T = stop.value
        return done
    finally:
        call.close()
