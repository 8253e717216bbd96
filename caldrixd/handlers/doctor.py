"""`doctor`: every lane, usable or with its reasons."""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from caldrix_protocol.messages import Doctor, Done, Lane, Message
from caldrix_protocol.refusals import sentence
from caldrixd.config import Config
from caldrixd.handlers.context import Client, Services
from caldrixd.lanes import choose
from caldrixd.lanes.drivers import kernel_cache

# The lanes that keep compiled kernels.
COMPILED = ("cpu",)


async def handle(request: Doctor, client: Client, services: Services) -> Message:
    """The probes run with the daemon's environment, not the client's: they say what the daemon could use."""
    for name in choose.ORDER:
        found = await to_thread.run_sync(
            choose.probe, name, services.config.environment, abandon_on_cancel=True
        )
        client.send(
            Lane(
                name=found.name,
                usable=found.usable,
                reasons=tuple(reason.text for reason in found.reasons),
                details=(*found.details, *(await to_thread.run_sync(_kept, name, services.config))),
                images=found.images,
                speculation=found.speculation,
            )
        )
    return Done()


def _kept(lane: str, config: Config) -> tuple[str, ...]:
    """Where the lane's compiled kernels are, as sentences."""
    if lane not in COMPILED:
        return ()
    usual = config.cache_directory / kernel_cache.KERNELS
    try:
        kernel_cache.make_writable(usual)
    except OSError as error:
        used = Path(config.address.directory) / kernel_cache.KERNELS
        return (sentence("notice/kernel-cache", path=usual, reason=error.strerror, used=used),)
    return (sentence("detail/kernel-cache", path=usual, size=kernel_cache.size(usual) // 1_000_000),)
