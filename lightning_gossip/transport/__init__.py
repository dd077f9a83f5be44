"""Moves vectors between workers and knows no algorithm."""

from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.gloo_group import GlooTransport
from lightning_gossip.transport.messages import Kind, Message

__all__ = [
    "GlooTransport",
    "Kind",
    "Message",
    "Pending",
    "Transport",
]
