"""A receiver as a process of its own, that reads the same version again and again until it is killed."""

from __future__ import annotations

import sys

from weightcast.transports.nixl.receiver import NixlReceiver

from .nixl_stand import MIB, memories, soon


def main() -> None:
    """Read the version in the second argument from the depot in the first."""
    url, version = sys.argv[1:]
    receiver = NixlReceiver(url, bucket_nbytes=MIB)
    manifest = receiver.manifest(version, deadline=soon())
    room = memories(manifest)
    told = False
    while True:
        for _ in receiver.landings(manifest, room, deadline=soon()):
            if not told:
                print("reading", flush=True)
                told = True


if __name__ == "__main__":
    main()
