"""The hospital's end of the client certificate: a loopback door that shows it to the federation's proxy.

Flower 1.42 verifies the server and signs every request, but it cannot present a client certificate. So the SuperNode
dials this door, over TLS with a certificate for loopback, and what it says goes on over a second TLS connection that
shows the kit's client certificate. Bytes are passed on as they are; nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 16
CONNECT_S = 20.0


class Tunnel:
    """Listens on ``127.0.0.1:port`` and connects every caller with ``host:port`` of the proxy."""

    def __init__(
        self, upstream: tuple[str, int], listening: ssl.SSLContext, dialling: ssl.SSLContext, say: Callable[[str], None]
    ) -> None:
        self.upstream, self.listening, self.dialling, self.say = upstream, listening, dialling, say
        self._told = ""

    async def start(self, port: int) -> asyncio.Server:
        """Opens the door. Raises OSError where the port is taken."""
        return await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.listening)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.upstream
        try:
            dial = asyncio.open_connection(host, port, ssl=self.dialling, server_hostname=host)
            there, back = await asyncio.wait_for(dial, CONNECT_S)
        except (OSError, TimeoutError) as error:
            self._tell(f"{host}:{port} cannot be reached: {error or type(error).__name__}")
            writer.close()
            return
        self._tell(f"connected with {host}:{port}")
        pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        # TLS has no half-open connections: when one side is done, both are.
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for closing in (back, writer):
            closing.close()
        await asyncio.gather(*pumps, return_exceptions=True)

    def _tell(self, text: str) -> None:
        """One line when things change, not one a connection."""
        if text != self._told:
            self._told = text
            self.say(text)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()


def listening_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """For the door: the kit's certificate for loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def dialling_context(authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """For the way to the proxy: only the federation's authority is believed, and the client certificate is shown."""
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key)
    return context
