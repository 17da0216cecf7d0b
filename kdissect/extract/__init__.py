"""Writes the packets of chosen exchanges and connections as a pcapng that Wireshark opens."""

from kdissect.extract.run import Extracted, extract

__all__ = ["Extracted", "extract"]
