"""A router before several inference engines that share a store: `infinistore route`.

`prompts` reads requests, `lookups` asks for their tokens and what the store has of
them, `fleet` knows the engines, `infinistore.scheduling` picks one, and `router` passes
the request and its answer on. docs/fleet.md is the page for operators.
"""

from infinistore.routing.fleet import Role
from infinistore.routing.http import Address, HttpLimits, listen
from infinistore.routing.router import Router, RouterOptions

__all__ = ["Address", "HttpLimits", "Role", "Router", "RouterOptions", "listen"]
