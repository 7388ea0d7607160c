"""A front end in a process of its own, which can be suspended: says READY, and when told to end, how often it restarted."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from .replicas import running


async def main(model_dir: Path) -> None:
    async with running(model_dir, heartbeat_s=0.5) as replica:
        print(replica.status.state, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(1)  # time to blame somebody
        print("restarts", replica.status.restarts, flush=True)


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[2]
    asyncio.run(main(Path(sys.argv[1])))
