"""Compare the byte model with what engines reported, launch by launch, and write docs/accuracy.md. Misses are listed.

    python bench/accuracy.py            writes docs/accuracy.md
    python bench/accuracy.py --check    says whether the page is up to date (exit 1 when not)

Everything is read from tests/data; nothing is measured here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import published  # noqa: E402
from gguf_writer import write_gguf  # noqa: E402

import residency  # noqa: E402
from residency.checkpoint import read  # noqa: E402
from residency.engines.llama_cpp import vision  # noqa: E402
from residency.errors import InputError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE = ROOT / "docs" / "accuracy.md"
MIB = 2**20
TOTAL, FREE, HOST = 150109880320, 149557477376, 270334464000
#: Purposes of the budget -> what the engine calls them.
GROUPS = {"weights": "model", "experts": "model", "kv": "context", "state": "context", "compute": "compute", "staging": "compute"}
#: A launch belongs to the first kind whose word stands in its arguments.
KINDS = (
    ("split mode tensor", "tensor"), ("experts or tensors elsewhere", "-ncmoe"), ("experts or tensors elsewhere", "-cmoe"), ("experts or tensors elsewhere", "-ot"),
    ("no flash attention", "-fa off"), ("quantised cache", "-ctk"), ("cache on the host", "-nkvo"), ("some layers on the host", "-ngl 1"), ("other", ""),
)  # fmt: skip


def cards(count: int, free: int = FREE) -> dict[str, Any]:
    """Return the machine of the measurements with that many cards."""
    names = [f"CUDA{i}" for i in range(count)]
    return {
        "name": f"{count} x NVIDIA H200",
        "pools": [{"name": n, "total_bytes": TOTAL, "free_bytes": free} for n in names] + [{"name": "host", "total_bytes": HOST, "free_bytes": HOST}],
        "devices": [{"name": n, "kind": "cuda", "pool": n, "model": "NVIDIA H200", "compute_capability": "9.0", "integrated": False} for n in names],
    }  # fmt: skip


class Launches:
    """The measured launches, each judged once."""

    def __init__(self, folder: Path, file: str = "llama_cpp_launches.json.gz") -> None:
        self.data = json.loads(gzip.decompress((ROOT / "tests" / "data" / file).read_bytes()))
        self.folder = folder

    def path(self, name: str) -> str:
        """Write a model's header once and return its path."""
        file = self.folder / f"{name}.gguf"
        if not file.exists():
            model = self.data["models"][name]
            write_gguf(file, model["metadata"], [tuple(t) for t in model["tensors"]])
        return str(file)

    def report(self, case: dict[str, Any], machine: dict[str, Any], *more: str) -> Any:
        """Return the report on a launch."""
        arguments = case["args"].split() if "args" in case else case["flags"]
        argv = ["llama-fit-params", "-m", self.path(case["model"]), *arguments, *more]
        return residency.validate(argv, engine="llama.cpp@0.5.0", machine=machine, environ=case.get("environ", {}))


def one_card(case: dict[str, Any]) -> bool:
    """Whether a launch ran where only one card was visible: a real run whose second card holds nothing."""
    return "used_mib" in case and not any(name.startswith("CUDA1") for name in case["buffers"]) and "--device" not in case["args"]


def sums(report: Any) -> dict[str, Counter[str]]:
    """Return likely bytes per pool and part."""
    found: dict[str, Counter[str]] = {}
    for a in report.budget.allocations:
        part = GROUPS.get(str(a.purpose))
        if part:
            found.setdefault(a.pool, Counter())[part] += a.likely_bytes
    return found


def compare(launches: Launches) -> list[tuple[str, str, str, str, int, int]]:
    """Return (kind, launch, device, part, engine, here) for every device of every launch."""
    rows = []
    combined = json.loads(gzip.decompress((ROOT / "tests" / "data" / "llama_cpp_tensor_split.json.gz").read_bytes()))
    split = {case["id"]: case["cards"] for case in combined["real"]}  # the engine reports their cards as one device
    for case in launches.data["cases"]:
        count = 1 if one_card(case) else 2
        have = sums(launches.report(case, cards(count)))
        kind = next(kind for kind, word in KINDS if word in case["args"])
        buffers = case["buffers"] | {f"CUDA{j}": card for j, card in enumerate(split.get(case["id"], ()))}
        for card in ("CUDA0", "CUDA1")[:count]:
            for index, part in enumerate(("model", "context", "compute")):
                rows.append((kind, case["id"], card, part, buffers.get(card, [0, 0, 0])[index], have.get(card, Counter())[part]))
    return rows


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    cells = (head, *rows)
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in cells]
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(head), *lines[1:]]


def against(want: int, have: int) -> tuple[str, str, str]:
    """Return the cells that hold the engine's figure, ours, and how far it is off."""
    return f"{want / MIB:.1f}", f"{have / MIB:.1f}", _percent(have, want)


def outside(want: int, have: int) -> bool:
    """Whether a compute buffer is off by more than 10 % and 16 MiB."""
    return abs(have - want) > max(0.10 * want, 16 * MIB)


def short(want: int, have: int) -> bool:
    """Whether a compute buffer is too low by more than 5 % and 8 MiB."""
    return want - have > max(0.05 * want, 8 * MIB)


def launches_section(launches: Launches) -> list[str]:
    rows = compare(launches)
    lines = [
        "## Measured launches", "",
        f"{len(launches.data['cases'])} launches of {len({c['model'] for c in launches.data['cases']})} models. {launches.data['origin']}.", "",
        "17 of them cannot be compared card by card as their command lines stand: 11 ran where only one card was visible, though the",
        "same command line elsewhere is a launch on two (they are compared with one card here), and 6 use split mode tensor, which the",
        "engine reports as one combined device: their figures are what the engine's library asks of every card in the same launch.", "",
        "*model* and *context* count as exact when they agree to the byte. *compute* is within the band when it is off by no more than",
        "10 % or 16 MiB, and too low when it is short by more than 5 % and 8 MiB.", "",
    ]  # fmt: skip
    head = ("Placement", "Launches", "model exact", "context exact", "compute within band", "too low", "median error", "worst over", "worst short")
    kinds = {kind: [r for r in rows if r[0] == kind] for kind, _ in KINDS}
    lines += [*table(head, [*((kind, *_cells(mine)) for kind, mine in kinds.items() if mine), ("**all**", *_cells(rows))]), ""]
    wrong = [r for r in rows if r[3] != "compute" and r[4] != r[5]]
    off = [r for r in rows if r[3] == "compute" and (outside(r[4], r[5]) or short(r[4], r[5]))]
    lines += ["### Misses", ""]
    if wrong:
        lines += ["Weights or caches that are not exact:", ""]
        ranked = sorted(wrong, key=lambda r: -abs(r[4] - r[5]))
        lines += [*table(("Launch", "Device", "Part", "Engine", "residency"), [(*r[1:4], f"{r[4]:,}", f"{r[5]:,}") for r in ranked]), ""]
    if off:
        lines += ["Compute buffers outside the band or too low:", ""]
        ranked = sorted(off, key=lambda r: -abs(r[4] - r[5]))
        lines += [*table(("Launch", "Device", "Engine, MiB", "residency, MiB", ""), [(*r[1:3], *against(r[4], r[5])) for r in ranked]), ""]
    if not wrong and not off:
        lines += ["None.", ""]
    return lines


def _percent(have: float, want: float) -> str:
    return f"{have / want - 1:+.1%}" if want else "engine has none"


def _cells(rows: list[tuple[str, str, str, str, int, int]]) -> tuple[object, ...]:
    compute = [(w, h) for *_, part, w, h in rows if part == "compute"]
    errors = [h / w - 1 for w, h in compute if w]

    def exact(part: str) -> str:
        mine = [r for r in rows if r[3] == part]
        return f"{sum(r[4] == r[5] for r in mine)} of {len(mine)}"

    within = f"{sum(not outside(w, h) for w, h in compute)} of {len(compute)}"
    errors_shown = (f"{statistics.median(map(abs, errors)):.1%}", f"{max(errors):+.1%}", f"{min(errors):+.1%}")
    return len({r[1] for r in rows}), exact("model"), exact("context"), within, sum(short(w, h) for w, h in compute), *errors_shown


def real_section(launches: Launches) -> list[str]:
    lines = [
        "## Launches that ran for real", "",
        "Device memory in use after the first full prompt, as the driver reports it, against the sum of the likely bytes: driver context,",
        "model, context, compute, and what the first prompt adds.", "",
    ]  # fmt: skip
    rows = []
    for case in (c for c in launches.data["cases"] if "used_mib" in c):
        count = 1 if one_card(case) else 2
        report = launches.report(case, cards(count))
        for index in range(count):
            idle, want = case["used_mib"]["idle"][index], case["used_mib"]["prompt"][index]
            if want:
                have = idle + sum(a.likely_bytes for a in report.budget.allocations if a.pool == f"CUDA{index}") / MIB
                rows.append((case["id"], f"CUDA{index}", f"{want:,}", f"{have:,.0f}", _percent(have, want)))
    return [*lines, *table(("Launch", "Card", "Measured, MiB", "residency, MiB", ""), rows), ""]


#: Cells that tell how far off the real launches are, in the order of the table's head.
REAL_HEAD = ("Launches", "Cards compared", "median", "worst short", "worst over", "more than 32 MiB short")
#: Kinds of real launches beside those of KINDS, tried first.
REAL_KINDS = (("16- and 32-bit weights", ("-f16/", "-bf16/", "-f32/")), ("two cards, layers", ("/2gpu",)))


def further_section(launches: Launches) -> list[str]:
    lines = [
        "## More launches that ran for real", "", f"{launches.data['origin']}", "",
        "Device memory in use after the first prompt batch against the sum of the likely bytes, MiB. The likely figure is meant to lie a few",
        "MiB on the safe side.", "",
    ]  # fmt: skip
    kinds: dict[str, list[tuple[str, float, float]]] = {}
    counts: Counter[str] = Counter()
    for run in launches.data["runs"]:
        report = launches.report(run, cards(run["cards"]))
        kind = "split mode tensor" if "tensor" in run["args"] else next((k for k, words in REAL_KINDS if any(w in run["id"] for w in words)), None)
        kind = kind or next(k for k, word in KINDS if word in run["args"])
        counts[kind] += 1
        for card, measured in enumerate(run["used_mib"]["prompt"]):
            have = sum(a.likely_bytes for a in report.budget.allocations if a.pool == f"CUDA{card}") / MIB
            kinds.setdefault(kind, []).append((f"{run['id']} CUDA{card}", measured, have))

    def row(name: str, launched: int, cells: list[tuple[str, float, float]]) -> tuple[object, ...]:
        off = [have - want for _, want, have in cells]
        return (name, launched, len(cells), f"{statistics.median(off):+.0f}", f"{min(off):+.0f}", f"{max(off):+.0f}", sum(o < -32 for o in off))

    every = [cell for cells in kinds.values() for cell in cells]
    rows = [row(kind, counts[kind], cells) for kind, cells in sorted(kinds.items())]
    lines += [*table(("", *REAL_HEAD), [*rows, row("**all**", sum(counts.values()), every)]), ""]
    far = sorted((c for c in every if c[2] - c[1] < -32 or c[2] - c[1] > max(150, 0.03 * c[1])), key=lambda c: c[2] - c[1])
    lines += ["Off by more than 32 MiB to the low side, or by more than 150 MiB and 3 % to the high side:", ""]
    return [*lines, *table(("Launch", "Measured, MiB", "residency, MiB", ""), ((n, f"{w:,}", f"{h:,.0f}", _percent(h, w)) for n, w, h in far)), ""]


def boundary_section(*measured: Launches) -> list[str]:
    lines = [
        "## Where the line is", "",
        "Contexts tried for real on one card with so much left free: the largest that served, the smallest that died, and the largest that",
        "residency allows with the default policy.", "",
    ]  # fmt: skip
    rows = []
    for launches, case in ((found, case) for found in measured for case in found.data["boundary"]):
        machine = cards(1, case["free_mib"] * MIB)
        served = case.get("largest_ok_context", case.get("largest_served"))
        died = case.get("smallest_failing_context", case.get("smallest_died"))
        low, high = 256, 8 * died
        while high - low > 256:
            middle = (low + high) // 2
            if launches.report(case, machine, "-c", str(middle)).exit_code == 0:
                low = middle
            else:
                high = middle
        name = f"{case['model']} {case.get('args') or ' '.join(case['flags'])}"
        rows.append((name, *(f"{n:,}" for n in (case["free_mib"], served, died, low)), f"{low / served - 1:+.1%}"))
    return [*lines, *table(("Launch", "Free, MiB", "Served", "Died", "Allowed up to", ""), rows), ""]


def encoder(path: Path, case: dict[str, Any]) -> vision.Tower:
    """Return the encoders of a projector file as the case runs them."""
    flash = ("off", "on", "auto")[case["flash_attn"]]
    found = vision.measure(read(str(path)), flash=flash, where="card" if case.get("gpu", 1) else "host", most_tokens=case["image_max_tokens"] or None)
    assert found is not None
    return found


def vision_section(folder: Path) -> list[str]:
    """Return the tables of image and sound encoders: two real ones, then every projector the engine knows."""
    data = json.loads((ROOT / "tests" / "data" / "llama_cpp_vision.json").read_text())
    lines = ["## Image and sound encoders", "", f"{data['what'][:1].upper()}{data['what'][1:]}. {data['engine']}.", ""]
    rows = []
    for name, model in data["mmproj"].items():
        write_gguf(folder / f"{name}.gguf", model["metadata"], [tuple(t) for t in model["tensors"]])
    for case in data["cases"]:
        tower = encoder(folder / f"{case['mmproj']}.gguf", case)
        device = "CUDA0" if case["gpu"] else "CPU"
        rows.append((case["id"], device, *against(case["bytes"][device], tower.weights_bytes + tower.warm_up_bytes)))
    return [*lines, *table(("Launch", "On", "Engine, MiB", "residency, MiB", ""), rows), "", *towers_section(folder)]


def towers_section(folder: Path) -> list[str]:
    """Return one line a projector: what the engine's library says on a device that reserves nothing, and what is said here."""
    data = json.loads(gzip.decompress((ROOT / "tests" / "data" / "llama_cpp_towers.json.gz").read_bytes()))
    kinds: dict[str, str] = {}
    for name, tower in data["towers"].items():
        tensors = [(r[0].replace("#", str(i)), r[1], tuple(r[2])) for r in tower["rows"] for i in range(r[3] if len(r) > 3 else 1)]
        write_gguf(folder / f"{name}.gguf", tower["metadata"], tensors)
        named = (tower["metadata"].get(f"clip.{side}projector_type", {}).get("str") for side in ("", "vision.", "audio."))
        kinds[name] = " and ".join(n for n in named if n)
    reserved: dict[str, list[tuple[int, int]]] = {}
    inputs: dict[str, list[tuple[int, int]]] = {}
    largest: dict[str, list[tuple[int, int]]] = {}
    for case in data["cases"]:
        kind, tower = kinds[case["mmproj"]], encoder(folder / f"{case['mmproj']}.gguf", case)
        reserved.setdefault(kind, []).append((case["bytes"]["CUDA0" if case["gpu"] else "CPU"], tower.weights_bytes + tower.warm_up_bytes))
        if case["gpu"]:
            inputs.setdefault(kind, []).append((case["bytes"]["CPU"], tower.input_bytes))
    for case in data["largest"]:
        kind, tower = kinds[case["mmproj"]], encoder(folder / f"{case['mmproj']}.gguf", case)
        largest.setdefault(kind, []).append((case["compute"]["CUDA0"], tower.largest_bytes))

    def worst(pairs: list[tuple[int, int]], sign: int) -> str:
        most = max((sign * (have - want) / want for want, have in pairs if want), default=0.0)
        return f"{sign * most:+.1%}" if most > 0 else "0"

    def exact(pairs: list[tuple[int, int]]) -> str:
        return f"{sum(want == have for want, have in pairs)} of {len(pairs)}" if pairs else ""

    models = Counter(kinds.values())
    rows = [
        (kind, models[kind], exact(pairs), worst(pairs, 1), worst(pairs, -1), exact(inputs[kind]), exact(largest.get(kind, [])))
        for kind, pairs in sorted(reserved.items())
    ]
    every = [pair for pairs in reserved.values() for pair in pairs]
    lines = [
        f"Every projector the engine has a graph for, with shapes of published models: {len(kinds)} files, {len(every)} launches with flash",
        "attention auto, on and off, on the card and on the processor, with and without `--image-max-tokens`. The figures are",
        "llama.cpp 0.5.0's own (`mtmd_get_memory_usage`) on a device that sizes buffers as CUDA does and allocates nothing; on the two",
        "files above it gives what the H200 gave. The headers were written for this comparison, from public configurations.", "",
    ]  # fmt: skip
    head = ("Projector", "Files", "Device bytes exact", "Worst over", "Worst short", "Host inputs exact", "Largest image exact")
    return [*lines, *table(head, rows), ""]


def cases_section(folder: Path) -> list[str]:
    """Return the table of published launches."""
    lines = [
        "## Published launches", "",
        "Launches whose outcome somebody reported, of llama.cpp and of engines built from it. The models are headers rebuilt from",
        "hyperparameters; a column is empty where the report prints no such buffer. Caches are compared as printed, to 0.01 MiB. Other",
        "builds than 0.5.0, and the fork, pack other graphs, so their compute buffers carry a wide band; the likely figure is shown.", "",
    ]  # fmt: skip
    head = ("Launch", "Engine", "Reported outcome", "Should be", "residency says", "Cache, printed / here", "Compute, printed / here")
    rows: list[Sequence[object]] = []
    misses, right = [], 0
    for case in published.CASES:
        expected = case.get("expected", case["verdict"])
        caches, buffers = [], []
        try:
            report = published.judge(case, folder)
        except InputError:
            says, verdict = "cannot be read (exit 2)", "unread"
        else:
            verdict = report.verdict
            outcome = "veto" if verdict == "veto" else "warn"
            rules = sorted({f.rule for f in published.loud(report, outcome)})
            says = verdict + (f"{': ' if verdict == 'veto' else ', warns: '}{', '.join(rules)}" if rules else "")
            for part, into in (("kv", caches), ("state", caches), ("buffers", buffers)):
                for pool, want in case.get(part, {}).items():
                    have = published.amounts(report, pool, part)[1]
                    into.append(f"{pool} {want:,.2f} / {have:,.2f}" + (f" ({_percent(have, want)})" if part == "buffers" else ""))
            if "kv_total" in case:
                total = sum(a.likely_bytes for a in report.budget.allocations if str(a.purpose) == "kv") / MIB
                caches.append(f"in all {case['kv_total']:,.2f} / {total:,.2f}")
        right += verdict == expected
        if verdict != expected:
            misses.append(f"- {case['id']}: {expected} was right, residency says {verdict}. {case.get('miss', '')[:1].upper()}{case.get('miss', '')[1:]}.")
        link = f"[{case['id']}]({case['link']})" if case["link"].startswith("http") else f"{case['id']} ({case['link']})"
        shown = "unread" if expected == "unread" else expected
        rows.append((link, case["engine"].replace("@", " "), case["outcome"], shown, says, "<br>".join(caches), "<br>".join(buffers)))
    lines += [*table(head, rows), "", f"{right} of {len(published.CASES)} as they should be.", "", "### Misses", "", *(misses or ["None."]), "", "### Judged elsewhere", ""]
    lines += [f"- {row['what']}: [{row['where']}]({row['where']})" for row in published.DATA["elsewhere"]]
    lines += ["", "### Not judged", ""]
    lines += table(("Report", "What", "What is missing"), [(row["link"], row["what"], row["missing"]) for row in published.DATA["not_judged"]])
    return [*lines, ""]


def page() -> str:
    """Return docs/accuracy.md."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launches, real = Launches(folder), Launches(folder / "real", "llama_cpp_real.json.gz")
        real.folder.mkdir()
        lines = [
            "# How near the bytes are", "", "<!-- written by bench/accuracy.py -->", "",
            "What residency computes from headers and flags, against what engines and drivers reported. Every figure here comes from data in",
            "`tests/data`; `python bench/accuracy.py` writes the page anew. The laws of the byte model were drawn from llama.cpp 0.5.0 and",
            "partly fitted to these launches, so the page shows agreement, not proof for launches of another kind.", "",
            *launches_section(launches), *real_section(launches), *further_section(real), *boundary_section(launches, real),
            *vision_section(folder), *cases_section(folder),
        ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    text = page()
    if options.check:
        same = PAGE.is_file() and PAGE.read_text() == text
        print("docs/accuracy.md is up to date" if same else "docs/accuracy.md is out of date: run python bench/accuracy.py")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"{PAGE.relative_to(ROOT)}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
