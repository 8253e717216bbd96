"""One module for each request of the protocol, and the table that finds it."""

from __future__ import annotations

from typing import Any

from caldrix_protocol.messages import Doctor, Generate, Models, Open, Pin, Plan, Ps, Pull, Remove, Stop
from caldrixd.handlers.context import Handler
from caldrixd.handlers.doctor import handle as doctor
from caldrixd.handlers.generate import handle as generate
from caldrixd.handlers.models import list_all, remove
from caldrixd.handlers.open import handle as open_model
from caldrixd.handlers.pin import handle as pin
from caldrixd.handlers.plan import handle as plan
from caldrixd.handlers.ps import handle as ps
from caldrixd.handlers.pull import handle as pull
from caldrixd.handlers.stop import handle as stop

HANDLERS: dict[type[Any], Handler] = {
    Open: open_model,
    Generate: generate,
    Ps: ps,
    Stop: stop,
    Doctor: doctor,
    Pull: pull,
    Plan: plan,
    Models: list_all,
    Remove: remove,
    Pin: pin,
}
