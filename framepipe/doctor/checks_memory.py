"""The checks of copies, counters, pinning and freeing, the fallback to system memory, and what to expect of pinning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framepipe.doctor.check import CLAIM, ELSEWHERE, NOTE, OK, UNKNOWN, VENDOR, Check, Found, Line, answer, has_gpu
from framepipe.doctor.measuring import churn_row, pinned_rows, rate
from framepipe.errors import ConfigError
from framepipe.probe import baselines
from framepipe.probe.bandwidth import HOST_COPY
from framepipe.units import format_bytes

NOT_MEASURED = "not measured; leave out --quick"
_FALLBACK = "NVIDIA, support article 5490: System Memory Fallback"
FALLBACK_DRIVER = (536, 40)
"""The first driver for Windows whose cudaMalloc may give system memory (NVIDIA's support article 5490)."""
_AGREE_BYTES, _AGREE_SHARE = 256 << 20, 0.02
_FULL, _GROWN_BYTES, _MUCH_BYTES = 0.95, 32 << 20, 256 << 20
_SLOW_PAGEABLE = 0.8


def bus(found: Found) -> Check:
    """Rates between host and device as measured, beside what `framepipe probe bandwidth` once kept."""
    measured = found["measured"]
    if measured is None:
        return answer("bus", "bus", NOT_MEASURED, status=UNKNOWN)
    known = list(_rates(measured))
    if not known:
        return answer("bus", "bus", f"nothing could be copied: {measured['reason']}", status=UNKNOWN)
    lines = [f"{words} {format_bytes(nbytes_per_s)}/s" for words, nbytes_per_s in known]
    gpu = measured["machine"]["gpu"]
    if gpu and len(found["gpu"]["devices"]) > 1:
        lines.append(f"measured on cuda:{gpu['index']}, {gpu['name']}")
    if measured["reason"] and (has_gpu(found) or measured["device"] not in ("auto", "cpu")):
        lines.append(f"no bus was measured: {measured['reason']}")
    elif not has_gpu(found):
        lines.append("there is no bus to a GPU")
    return answer("bus", "bus", *lines, *_kept(measured), f"all measurements took {measured['seconds']:g} s")


def _rates(measured: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    wanted = (
        ("page-locked, to the device", "to_device", "default"),
        ("page-locked, to the host", "to_host", "default"),
        ("pageable, to the device", "to_device", "pageable"),
        ("pageable, to the host", "to_host", "pageable"),
        ("host to host, one thread", HOST_COPY, HOST_COPY),
    )
    for words, what, kind in wanted:
        nbytes_per_s = rate(measured, what, kind)
        if nbytes_per_s is not None:
            yield words, nbytes_per_s


def _kept(measured: Mapping[str, Any]) -> Iterator[str]:
    """The ceiling of an earlier `framepipe probe bandwidth`, of the same GPU and driver."""
    try:
        machines = baselines.read(baselines.default_path())
    except ConfigError as error:
        yield f"the baseline cannot be read: {error}"
        return
    kept = machines.get(baselines.key({"provenance": measured["machine"]}))
    for key, words in (("to_device", "to the device"), ("to_host", "to the host")):
        ceiling = kept["ceiling"].get(f"{key}_bytes_per_s") if kept else None
        if kept and ceiling:
            yield f"probe bandwidth kept {format_bytes(ceiling)}/s {words}, measured {kept['measured']}"


# -- counters --


def counters(found: Found) -> Check:
    """Whether CUDA, NVML and Windows tell the same of free memory, read in one moment by one process."""
    measured = found["measured"]
    if measured is None:
        return answer("counters", "counters", NOT_MEASURED, status=UNKNOWN)
    if not has_gpu(found):
        return answer("counters", "counters", "there is no GPU whose memory could be counted", status=NOTE)
    row = measured["counters"]
    known = {words: nbytes for words, nbytes in _free(row).items() if nbytes is not None}
    if not known:
        return answer("counters", "counters", f"no counter of video memory: {measured['reason']}", status=UNKNOWN)
    lines = [f"{words} {format_bytes(nbytes)}" for words, nbytes in known.items()]
    lines += [f"{name}: {why}" for name, why in measured["missing"].items() if _worth_saying(name, found)]
    if measured["context_bytes"] is not None:
        lines.append(f"a process takes {format_bytes(measured['context_bytes'])} of the GPU for its context alone")
    nonsense = [words for words, nbytes in known.items() if nbytes < 0 or (row.get("cuda.total") or nbytes) < nbytes]
    if nonsense:
        return answer("counters", "counters", *lines, f"cannot be: {', '.join(nonsense)}", status=UNKNOWN)
    return answer("counters", "counters", *lines, *_apart(known, row), status=NOTE if _far(known, row) else OK)


def _worth_saying(name: str, found: Found) -> bool:
    return name in ("cuda", "nvml") or (name == "wddm" and found["system"] == "win32")


def _free(row: Mapping[str, int | None]) -> dict[str, int | None]:
    budget, usage = row.get("wddm.local_budget"), row.get("wddm.local_usage")
    return {
        "CUDA: free": row.get("cuda.free"),
        "NVML: free": row.get("nvml.free"),
        "Windows: left of this process's budget": None if budget is None or usage is None else budget - usage,
    }


def _spread(known: Mapping[str, int]) -> int:
    return max(known.values()) - min(known.values())


def _far(known: Mapping[str, int], row: Mapping[str, int | None]) -> bool:
    return _spread(known) > max(_AGREE_BYTES, _AGREE_SHARE * (row.get("cuda.total") or 0))


def _apart(known: Mapping[str, int], row: Mapping[str, int | None]) -> list[Line]:
    if len(known) < 2:
        return [Line("one counter alone: there is nothing to compare it with")]
    said = "they agree to" if not _far(known, row) else "they are apart by"
    lines = [Line(f"{said} {format_bytes(_spread(known))}; the least of them is what counts")]
    if _far(known, row):
        words = 'CUDA\'s figure is free "according to the OS", and no promise that so much can be had'
        lines.append(Line(words, VENDOR, "NVIDIA, CUDA Driver API, cuMemGetInfo"))
    return lines


# -- pinning and freeing --


def churn(found: Found) -> Check:
    """What pinning and freeing for every frame would cost here, beside a pool."""
    each, pooled = (churn_row(found["measured"], pooled=pooled) for pooled in (False, True))
    if found["measured"] is None:
        return answer("churn", "pin and free", NOT_MEASURED, status=UNKNOWN)
    if each is None or each["take_p50_ms"] is None:
        reason = each["reason"] if each else "nothing was measured"
        return answer("churn", "pin and free", f"could not be measured: {reason}", status=UNKNOWN)
    what = "page-locking" if each["kind"] == "default" else "mapping"
    words = f"{what} a block of 64 kB to 8 MB takes {each['take_p50_ms']:.3f} ms, p99 {each['take_p99_ms']:.3f} ms"
    lines = [Line(f"{words}; {each['allocations_per_s'] or 0:.0f} a second were done")]
    if each["errors"]:
        lines.append(Line(f"refused: {each['errors']}"))
    if pooled is not None and pooled["take_p50_ms"] is not None:
        words = f"out of a pool it takes {pooled['take_p50_ms']:.3f} ms: `staging: pooled`, the default on a GPU"
        lines.append(Line(f"{words}; a run's report has how often it pinned (`memory.pinned_allocations`)"))
    return answer("churn", "pin and free", *lines)


# -- the fallback to system memory --


def fallback(found: Found) -> Check:
    """Whether video memory that is full has become system memory in silence, by its signs (Windows alone)."""
    title = "fallback"
    if not has_gpu(found):
        return answer("fallback", title, "there is no GPU whose memory could be full")
    driver = _number(found["gpu"]["driver"])
    if found["wsl2"]:
        words = Line("users report that WSL 2 ignores Windows' setting", CLAIM, "microsoft/WSL#11050")
        return answer("fallback", title, "its signs are counters of Windows, not seen from here", words, status=UNKNOWN)
    if found["system"] != "win32":
        none = "full video memory is an error here and not slow: the fallback is of drivers for Windows"
        return answer("fallback", title, Line(none, VENDOR, _FALLBACK))
    if driver is not None and driver < FALLBACK_DRIVER:
        return answer("fallback", title, f"driver {found['gpu']['driver']} has none: it came with 536.40")
    rule = Line(
        "since driver 536.40 full video memory may mean system memory, slow, in place of an error",
        VENDOR,
        _FALLBACK,
    )
    before, after = found["windows"]
    if after["reason"]:
        return answer("fallback", title, rule, f"its signs are not known: {after['reason']}", status=UNKNOWN)
    sizes = {device["uuid"]: device["memory_bytes"] for device in found["gpu"]["devices"]}
    seen = list(signs(before, after, sizes))
    if not seen:
        return answer("fallback", title, rule, "no sign of it now", status=OK)
    advice = (
        "video memory is full: close what is not needed, lower depth, batch or size; for an error in place of slowness "
        "set CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback in the NVIDIA control panel, for this Python",
    )
    return answer("fallback", title, rule, *seen, advice=advice)


def signs(before: Mapping[str, Any], after: Mapping[str, Any], sizes: Mapping[str, int | None]) -> Iterator[str]:
    """In words, of two readings of Windows' counters: non-local use that grows, or is much, while local is full.

    ``sizes`` are bytes of video memory by UUID. Page-locked memory is non-local as well, so that alone it is no sign.
    """
    was = {(row["gpu"], row["pid"]): row["non_local_bytes"] or 0 for row in before["processes"]}
    for adapter in after["adapters"]:
        size, used = sizes.get(adapter["uuid"]), adapter["dedicated_bytes"]
        if not size or used is None or used < _FULL * size:
            continue
        for row in after["processes"]:
            now = row["non_local_bytes"]
            if row["gpu"] != adapter["uuid"] or now is None:
                continue
            grown = now - was.get((row["gpu"], row["pid"]), 0)
            if grown >= _GROWN_BYTES or now >= _MUCH_BYTES:
                growing = f", {format_bytes(grown)} more than before" if grown >= _GROWN_BYTES else ""
                yield (
                    f"{format_bytes(used)} of {format_bytes(size)} video memory are in use, and process {row['pid']} "
                    f"has {format_bytes(now)} of non-local memory{growing}"
                )


def _number(driver: str | None) -> tuple[int, ...] | None:
    parts = (driver or "").split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


# -- what to expect --


def pinning(found: Found) -> Check:
    """What page-locking costs here as measured or as is known, and what to change, the most useful first."""
    lines = [*_held(found), *_expected(found)]
    return answer("pinning", "pinning", *lines, advice=tuple(_changes(found)))


def _held(found: Found) -> Iterator[Line]:
    for row in pinned_rows(found["measured"]):
        size, what = format_bytes(row["requested"]), "page-locked" if row["kind"] == "default" else row["kind"]
        if row["status"] != "ok":
            yield Line(f"{size} {what}: {row['status']}, {row['reason']}")
            continue
        if row["free"] is not None:
            back = "all came back" if (row["free_after"] or 0) > -(8 << 20) else "not all came back in 5 s"
            yield Line(f"{size} {what} took {format_bytes(max(0, -row['free']))} of free video memory; {back}")
        elif row["allocate_s"] is not None:
            yield Line(f"{size} of {what} memory took {row['allocate_s']:.2f} s to make; it costs no video memory")


def _expected(found: Found) -> Iterator[Line]:
    if not has_gpu(found):
        words = "on the CPU nothing is gained by pinning: the decoder's own frames travel (`staging: direct`)"
        yield Line(words, ELSEWHERE, "framepipe's README, How fast it is")
        return
    if found["system"] == "win32":
        yield Line(
            "it is charged to non-local (shared) memory, whose budget changes with what others want",
            VENDOR,
            "Microsoft, Windows driver docs: GPU segments, Process residency budgets",
        )
        yield Line("an article's 200 to 400 MB of video memory for each GB: no report confirms it or refutes it", CLAIM)
    elif not found["wsl2"]:
        words = "2 MB of page tables in video memory for each GB, and nothing below 256 MB"
        yield Line(words, ELSEWHERE, "Linux 6.18, one H200, driver 580.159, `framepipe probe pinned`")


def _changes(found: Found) -> Iterator[str]:
    measured = found["measured"]
    if any(device["driver_model"] == "WDDM" for device in found["gpu"]["devices"]):
        yield "under WDDM page-locked memory counts against the GPU's budget: prefer the pooled staging strategy"
    refused = [row for row in pinned_rows(measured) if row["kind"] == "default" and row["status"] == "failed"]
    if refused and not found["wsl2"]:
        size = format_bytes(refused[0]["requested"])
        yield f"{size} could not be page-locked: keep slots * batch * picture below, or use staging: pageable"
    page_locked, pageable = (rate(measured, "to_device", kind) for kind in ("default", "pageable"))
    if page_locked and pageable and pageable > _SLOW_PAGEABLE * page_locked:
        yield (
            "page-locked copies are hardly faster than pageable ones here, which is odd: run framepipe probe bandwidth "
            "and look for the PCIe link in what nvidia-smi -q says"
        )
