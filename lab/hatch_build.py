"""The dependencies of kvkeep-lab. It uses inner modules of kvkeep, so it asks for kvkeep of its own version."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

OTHERS = ["httpx>=0.27"]


class SameVersion(MetadataHookInterface):
    """Adds the dependencies once the version is known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the dependencies into the metadata of the project."""
        metadata["dependencies"] = [f"kvkeep=={metadata['version']}", *OTHERS]
