"""What the URL of a `nixl://` source says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from weightcast.errors import InvalidInput
from weightcast.transports.http.access import Access
from weightcast.transports.http.shares import SCHEME_PREFIX, SharesReceiver
from weightcast.transports.nixl.depot_receiver import NixlDepotReceiver
from weightcast.transports.nixl.receiver import NixlReceiver

_SETTINGS: dict[str, Callable[[str], Any]] = {
    "mode": str, "prefetch": int, "bucket_nbytes": int, "stall_s": float, "nic": str,
}  # fmt: skip
KNOWN = frozenset({"token_file", "ca_file", "tls", *_SETTINGS})


def open_nixl(location: SplitResult, options: Mapping[str, str]) -> NixlReceiver | SharesReceiver:
    """The receiver for `nixl://host:port[?options]`, or for `shares+nixl://host:port,host:port`, the hosts of all trainer
    ranks. With `ca_file` or `tls=true` the depots are spoken to over TLS.

    Raises `InvalidInput` listing what cannot be read. NIXL itself is loaded when the first version is.
    """
    shared = location.scheme.startswith(SCHEME_PREFIX)
    wrong = [f"{name} is not known" for name in options.keys() - KNOWN]
    settings: dict[str, Any] = {}
    for name in _SETTINGS.keys() & options.keys():
        try:
            settings[name] = _SETTINGS[name](options[name])
        except ValueError:
            wrong.append(f"{name}={options[name]} cannot be read")
    tls = options.get("tls", "true" if "ca_file" in options else "false")
    if tls not in ("true", "false"):
        wrong.append(f"tls={tls} is neither true nor false")
    hosts = location.netloc.split(",")
    if not all(hosts) or "@" in location.netloc or location.path.strip("/") or (len(hosts) > 1 and not shared):
        wrong.append("it must name one depot: nixl://host:port; or all trainer ranks: shares+nixl://host:port,host:port")
    if shared and options.get("mode", "rdma") != "rdma":
        wrong.append("mode=gdr reads what one trainer lends, and not what several share")
    if wrong:
        known = ", ".join(sorted(KNOWN | {"deltas"}))
        raise InvalidInput(f"this nixl:// source cannot be opened: {'; '.join(sorted(wrong))}. Options: {known}.")
    files = {name: Path(options[name]) for name in ("token_file", "ca_file") if name in options}
    urls = [f"{'https' if tls == 'true' else 'http'}://{host}" for host in hosts]
    access = Access.read(**files)
    if settings.get("mode") not in (None, "rdma"):
        return NixlReceiver(urls[0], access=access, **settings)
    settings.pop("mode", None)
    if not shared:
        return NixlDepotReceiver(urls[0], access=access, **settings)
    return SharesReceiver(urls, access=access, reader=lambda url: NixlDepotReceiver(url, access=access, **settings))
