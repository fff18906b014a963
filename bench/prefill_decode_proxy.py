"""A proxy before a pair of vLLM servers: each completion goes to the prefill server for
one token, and then, as it came, to the decode server, whose answer is passed on. What
else is asked goes to the decode server alone.

    python bench/prefill_decode_proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

The prefill server answers when its blocks are stored, so the decode server finds them.
It prints a line when it is ready.
"""

import argparse
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

__all__: list[str] = []

_LIMIT_S = 600.0
_SESSION: Any = web.AppKey("session", ClientSession)


class Proxy:
    """Passes requests on; `prefill` and `decode` are the servers' URLs."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    def application(self) -> Any:
        made = web.Application(client_max_size=64 << 20)
        made.cleanup_ctx.append(_session)
        for path in ("/v1/completions", "/v1/chat/completions"):
            made.router.add_post(path, self._complete)
        made.router.add_route("*", "/{path:.*}", self._pass_on)
        return made

    async def _complete(self, request: Any) -> Any:
        session, asked = request.app[_SESSION], await request.json()
        first = {
            name: value for name, value in asked.items() if name not in {"stream_options", "max_completion_tokens"}
        }
        async with session.post(self._prefill + request.path, json={**first, "stream": False, "max_tokens": 1}) as done:
            body = await done.read()
            if done.status != 200:
                return web.Response(status=done.status, body=body, content_type=done.content_type)
        return await self._pass_on(request)

    async def _pass_on(self, request: Any) -> Any:
        body, headers = await request.read(), {"Content-Type": request.content_type}
        session = request.app[_SESSION]
        async with session.request(request.method, self._decode + request.path, data=body, headers=headers) as source:
            kind = source.headers.get("Content-Type", "application/octet-stream")
            response = web.StreamResponse(status=source.status, headers={"Content-Type": kind})
            await response.prepare(request)
            async for part in source.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


async def _session(application: Any) -> AsyncIterator[None]:
    async with ClientSession(timeout=ClientTimeout(total=_LIMIT_S)) as session:
        application[_SESSION] = session
        yield


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description="A proxy before a prefill and a decode server.")
    parser.add_argument("--port", type=int, required=True, help="where it listens, on 127.0.0.1")
    parser.add_argument("--prefill", required=True, metavar="URL", help="the server that computes prompts")
    parser.add_argument("--decode", required=True, metavar="URL", help="the server that answers")
    given = parser.parse_args()
    proxy = Proxy(given.prefill, given.decode)
    web.run_app(proxy.application(), host="127.0.0.1", port=given.port, print=lambda *_: print("ready", flush=True))


if __name__ == "__main__":
    main()
