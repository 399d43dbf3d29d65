"""The benchmark commands run and write what their readers expect; what they measure is not a test's business."""

import argparse
import json
import mmap
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    breakdown,
    cases,
    child,
    compiled,
    detection,
    memory,
    mixing,
    padding,
    page,
    results,
    scaling,
    speed,
    tables,
)
from benchmarks.cases import MODES
from benchmarks.scaling import AXES

from kernelwarehouse.assemble import routing

PRESET = ["--preset", "kw1x_small_resnet", "--batch", "2"]
# The table: a case's name, and the most that ours may take with AVX2 and with AVX-512.
TARGETS = {
    "kw1x_resnet18 inference batch 1": (1.30, 1.25),
    "kw1x_resnet18 inference batch 16": (1.25, 1.35),
    "kw1x_resnet18 training batch 16": (1.35, 1.50),
    "kw4x_resnet18 inference batch 1, prepared": (1.40, 1.80),
    "kw4x_resnet18 inference batch 16, prepared": (1.10, 1.30),
    "kw1x_resnet50 inference batch 1": (1.60, 1.90),
    "kw1x_resnet50 inference batch 16": (1.20, 1.40),
    "kw1x_resnet50 training batch 16": (1.60, 1.75),
    "kw4x_resnet50 inference batch 1, prepared": (1.6, 2.2),
    # Preparation of either kind has the same target.
    "kw4x_resnet18 inference batch 1, prepared compact": (1.40, 1.80),
    "kw4x_resnet50 inference batch 1, prepared compact": (1.6, 2.2),
    "kw1x_mobilenetv2_100 inference batch 1": (1.45, 1.55),
    "kw1x_mobilenetv2_100 training batch 16": (1.05, 1.10),
    "kw1x_small_resnet training batch 128": (1.6, 1.9),
    "kw1x_small_resnet training batch 64 at 28x28": (1.9, 2.2),
}
AMD = {"processor": "AMD EPYC", "vector instructions": "AVX2", "cores": 2}
INTEL = {"processor": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "vector instructions": "AVX512", "cores": 2}


def test_cases_have_the_targets_of_the_vector_instructions_at_hand() -> None:
    found = {case.name: case for case in cases.SPEED}
    for name, (avx2, avx512) in TARGETS.items():
        assert found[name].facts("AVX2")["most"] == avx2
        assert found[name].facts("AVX512")["most"] == avx512
        assert found[name].facts("DEFAULT")["most"] is None
    others = set(found) - set(TARGETS)
    assert others == {
        "kw1x_resnet50 inference batch 1, prepared compact",
        "kw4x_mobilenetv2_100 inference batch 1",
        "kw4x_mobilenetv2_100 training batch 16",
    }
    for case in cases.MEMORY:
        most = 1.05 if "mobilenet" in case.name else 1.08 if case.preset.startswith("kw1x") else 1.40
        assert case.facts("AVX2")["most"] == case.facts("AVX512")["most"] == most


def test_a_case_is_measured_on_images_of_its_size() -> None:
    sides = {case.name: case.image for case in cases.SPEED if case.preset == "kw1x_small_resnet"}
    assert sides == {
        "kw1x_small_resnet training batch 128": 32,
        "kw1x_small_resnet training batch 64 at 28x28": 28,
    }
    seen: list[tuple[int, ...]] = []
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 28 * 28, 10))
    model.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    cases.runner(model, "static", "training", 64, 28, classes=10)()  # a target of 10 or more would raise
    assert seen == [(64, 3, 28, 28)]


def test_options_make_the_same_case_in_another_process() -> None:
    parser = argparse.ArgumentParser()
    cases.add_arguments(parser, cases.MODES, [1, 16])
    for case in (*cases.SPEED, *cases.MEMORY):
        (made,) = cases.chosen_cases(parser.parse_args(case.options()), cases.SPEED)
        for fact in ("preset", "mode", "batch", "prepared", "image", "classes"):
            assert getattr(made, fact) == getattr(case, fact)


def test_files_are_named_after_the_processor_and_its_vector_instructions() -> None:
    assert results.slug(AMD) == "amd-epyc-avx2"
    assert results.slug(INTEL) == "intel-xeon-platinum-8481c-avx512"
    assert results.slug({**AMD, "told": {"KERNELWAREHOUSE_LANES": "8"}}) == "amd-epyc-told-avx2"
    assert results.slug({**AMD, "processor": "AMD EPYC 7763 64-Core Processor"}) == "amd-epyc-7763-avx2"
    anonymous = {**INTEL, "processor": "Intel(R) Xeon(R) Processor @ 2.80GHz"}  # others of that name have no rate
    assert results.slug(anonymous) == "intel-xeon-2-80ghz-avx512"
    assert results.destination("speed-2", INTEL).name == "speed-2-intel-xeon-platinum-8481c-avx512.json"


def test_results_say_how_much_time_other_machines_took(tmp_path: Path) -> None:
    begin, end = [10, 0, 5, 100, 3, 0, 1, 2, 0, 0], [70, 1, 14, 500, 9, 1, 2, 10, 0, 0]
    assert results.stolen_share(begin, end) == 0.1  # 8 of 60 + 1 + 9 + 1 + 1 + 8
    assert results.stolen_share(begin, begin) is None
    assert results.stolen_share([], []) is None
    results.write(tmp_path / "any.json", {"machine": AMD, "rows": []})
    stolen = json.loads((tmp_path / "any.json").read_text())["machine"]["stolen"]
    assert stolen is None or 0 <= stolen <= 1
    facts = {**results.machine(1), "stolen": 0.125}
    assert "12.5% of the processor's time taken by other machines" in tables.caption(facts)
    del facts["stolen"]
    assert "taken by" not in tables.caption(facts)


def test_what_a_machine_was_told_to_use_is_a_fact_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in results._TELLING:
        monkeypatch.delenv(name, raising=False)
    assert "told" not in results.machine(1)
    assert "told" not in tables.caption(results.machine(1))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    facts = results.machine(1)
    assert facts["told"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert "told ONEDNN_MAX_CPU_ISA=AVX2" in tables.caption(facts)
    assert "-told-" in results.destination("speed-1", facts).stem


@pytest.mark.parametrize(
    "difference", [INTEL, {"cores": 64}, {"vector instructions": "AVX512"}, {"told": {"KERNELWAREHOUSE_LANES": "8"}}]
)
def test_results_of_another_machine_stay(tmp_path: Path, difference: dict[str, Any]) -> None:
    out = tmp_path / "speed.json"
    results.write(out, {"machine": AMD, "rows": [1]})
    other = {**AMD, **difference}
    with pytest.raises(SystemExit, match=r"another machine's results .*here"):
        results.destination("speed-1", other, out)
    with pytest.raises(SystemExit, match="another machine's results"):
        results.write(out, {"machine": other, "rows": [2]})
    assert json.loads(out.read_text())["rows"] == [1]
    results.write(out, {"machine": {**AMD, "commit": "later"}, "rows": [3]})  # the same machine's are renewed
    assert json.loads(out.read_text())["rows"] == [3]


@pytest.mark.parametrize(
    "beside, alone, best", [([3.0, 1.0, 2.0], [1.0, 1.5, 9.0], 1.5), ([1.0], [4.0, 3.0, 5.0], 1.0)]
)
def test_ratios_are_to_the_static_networks_own_best(beside: list[float], alone: list[float], best: float) -> None:
    found = speed.summary({"static": beside, "ours": [3.0, 6.0, 3.0], "plain": [12.0]}, alone)
    assert found["milliseconds"] == {"static": 1e3 * best, "ours": 3e3, "plain": 12e3}
    assert found["ratio"] == {"ours": 3 / best, "plain": 12 / best}
    medians = {"beside ours": 1e3 * sorted(beside)[len(beside) // 2], "alone": 1e3 * sorted(alone)[1]}
    assert found["static milliseconds"] == medians


def test_what_is_done_on_first_use_is_not_counted() -> None:
    calls: list[str] = []
    runs = {way: lambda way=way: calls.append(way) for way in ("static", "plain", "ours")}
    times = speed.take_turns(runs, seconds=0, fewest=3, clock="wall")
    assert {way: len(taken) for way, taken in times.items()} == {"static": 3, "ours": 3, "plain": 1}
    assert calls[:4] == ["static", "ours"] * 2  # to warm up
    assert sorted(calls[4:10]) == ["ours"] * 3 + ["static"] * 3
    assert calls[10:] == ["plain"] * 2  # the first of them to warm up
    assert len(speed.few(runs["plain"], seconds=60, most=3)) == 3


def test_speed_writes_ratios_of_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(speed, "static_alone", lambda case, _: asked.append(case.name) or nullcontext(lambda: 0.001))
    out = tmp_path / "speed.json"
    speed.main([*PRESET, "--mode", "inference", "training", "--seconds", "0", "--rounds", "1", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["machine"]["threads"] == 1
    names = ["kw1x_small_resnet inference batch 2", "kw1x_small_resnet training batch 2"]
    assert [row["name"] for row in written["rows"]] == asked == names
    for row in written["rows"]:
        taken = row["milliseconds"]
        assert taken["static"] == min(row["static milliseconds"].values())
        assert row["rounds"] == {"static": 1, "plain": 1, "ours": 1, "static alone": 1}
        assert row["static milliseconds"]["alone"] == 1
        assert sum(row["routes"].values()) == 8  # layers of ours
        assert "plain" not in row["routes"]
        for way in ("plain", "ours"):
            assert row["ratio"][way] == pytest.approx(taken[way] / taken["static"], rel=0.02)


def test_speed_measures_the_static_network_alone_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    speed.main(["--only", "at 28x28", "--ways", "static", "ours", "--seconds", "0", "--rounds", "2", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["rounds"] == {"static": 2, "ours": 2, "static alone": 2}
    assert set(row["static milliseconds"]) == {"beside ours", "alone"}
    assert min(row["static milliseconds"].values()) > 0
    assert row["most"] == cases.avx(1.9, 2.2).get(torch.backends.cpu.get_cpu_capability())


def test_a_process_that_fails_says_why() -> None:
    said = r"(?s)benchmarks.speed --only nothing failed:.*no case has 'nothing'"
    with pytest.raises(RuntimeError, match=said):
        child.ask("speed", ["--only", "nothing"])
    with child.partner("speed", ["--only", "nothing"]) as ask:
        for _ in range(2):  # it may end before it is asked, or after
            with pytest.raises(RuntimeError, match=said):
                ask()


def test_what_runs_elsewhere_takes_its_turns() -> None:
    """After it, a step that is not counted, of the one that is next."""
    calls: list[str] = []
    runs = {way: lambda way=way: calls.append(way) for way in ("static", "ours")}
    times = speed.interleave(runs, 0, 3, elsewhere={speed.ALONE: lambda: calls.append("alone") or 7.0})
    assert times[speed.ALONE] == [7.0] * 3
    assert {way: len(taken) for way, taken in times.items()} == {"static": 3, "ours": 3, speed.ALONE: 3}
    forth, back = ["static", "ours", "alone", "ours"], ["ours", "static", "alone", "static"]
    assert calls[4:] == [*forth, *back, *forth]


def test_pages_that_the_system_gives_are_counted() -> None:
    """Megabytes that are mapped, touched and handed back in every step are pages each time, of whatever size."""

    def touch() -> None:
        with mmap.mmap(-1, 16 << 20) as memory:
            memory[::1024] = bytes(len(memory) // 1024)

    pages: dict[str, list[int]] = {}
    speed.interleave({"static": lambda: None, "ours": touch}, 0, 3, pages=pages)
    assert len(pages["static"]) == len(pages["ours"]) == 3
    assert min(pages["ours"]) > max(pages["static"])


def test_memory_takes_each_way_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    memory.main([*PRESET, "--ways", "static", "ours", "--steps", "1", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["megabytes"]) == {"static", "ours"}
    assert all(size > 1 for size in row["megabytes"].values())


def test_mixing_compares_the_hidden_way_with_the_usual_one(tmp_path: Path) -> None:
    out = tmp_path / "mixing.json"
    mixing.main(
        ["--only", "kw4x_resnet18 layer3", "--batch", "2", "--seconds", "0", "--rounds", "1", "--out", str(out)]
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert row["usual"] == row["chosen"] != "hidden"  # two samples are too few
    taken = row["milliseconds"]
    assert set(taken) == {row["usual"], "hidden"}
    assert row["ratio"] == pytest.approx(taken["hidden"] / taken[row["usual"]], rel=0.02)
    assert row["units"] == 17


def test_breakdown_names_every_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    breakdown.main(["kw1x_small_resnet", "--batch", "2", "--rounds", "1", "--operators", "3"])
    shown = capsys.readouterr().out
    assert "stages.2.0.conv2_kxk.conv" in shown
    assert "all 8 layers" in shown
    assert "aten::" in shown  # the names of operators


def test_breakdown_says_which_ways_the_timed_steps_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training chooses forward and backward apart from inference."""

    def by_rule(x: Any, question: routing.Question) -> routing.Route:
        return routing.Route(*(("matmul", "grouped") if question.training else ("windows", None)), "as the test wants")

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(routing, "_by_rule", by_rule)
    monkeypatch.setattr(routing, "_answers", {})
    for mode, way in (("training", "matmul/grouped"), ("inference", "windows")):
        breakdown.main(["kw1x_small_resnet", "--mode", mode, "--batch", "2", "--rounds", "1"])
        rows = [line for line in capsys.readouterr().out.splitlines() if "conv" in line and "x" in line]
        assert len(rows) == 8
        assert all(f" {way} " in row for row in rows)


def fake_measure(point: scaling.Point, chosen: Any) -> dict[str, Any]:
    taken = {"static": 1.0 + point.batch, "ours": 2.0 + point.batch}
    row = {"threads": chosen.threads[0], "point": scaling.asdict(point), "milliseconds": dict.fromkeys(MODES, taken)}
    return {**row, "megabytes": {} if chosen.brief else taken}


def test_scaling_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, scaling.Point]] = []

    def measure(point: scaling.Point, chosen: Any) -> dict[str, Any]:
        if len(measured) == 9:
            raise KeyboardInterrupt
        measured.append((chosen.threads[0], point))
        return fake_measure(point, chosen)

    monkeypatch.setattr(scaling, "measure", measure)
    out = tmp_path / "scaling.json"
    with pytest.raises(KeyboardInterrupt):
        scaling.main(["--threads", "1", "--out", str(out)])
    assert len(json.loads(out.read_text())["rows"]) == 10  # with batch 8, which is budget 1 as well
    monkeypatch.setattr(scaling, "measure", fake_measure)
    scaling.main(["--threads", "1", "--resume", "--out", str(out)])
    scaling.main(["--threads", "2", "--resume", "--brief", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["machine"]["threads"] == [1, 2]
    points = [(row["threads"], row["axis"], row["value"]) for row in written["rows"]]
    assert points == [(threads, axis, value) for threads in (1, 2) for axis in AXES for value in AXES[axis]]
    with pytest.raises(SystemExit, match=r"cannot be resumed \(rounds 3, now 7\)"):
        scaling.main(["--threads", "1", "--resume", "--rounds", "7", "--out", str(out)])


def test_scaling_measures_the_plain_definition_and_memory_with_the_first_threads_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(scaling.subprocess, "run", run)
    chosen = scaling.arguments_parser().parse_args([])
    scaling.run_threads(None, chosen)
    first, second = (scaling.arguments_parser().parse_args(command[3:]) for command in commands)
    assert (first.threads, first.brief, first.resume) == ([1], False, False)
    assert (second.threads, second.brief, second.resume) == ([2], True, True)
    assert (first.axis, first.ways, first.rounds, first.seconds) == (list(AXES), chosen.ways, 3, 1.5)


def test_scaling_measures_times_and_memory_of_a_point() -> None:
    options = ["--threads", "1", "--ways", "static", "ours", "--seconds", "0", "--rounds", "1"]
    chosen = scaling.arguments_parser().parse_args(options)
    point = scaling.Point(batch=2, width=0.5, image=32)
    found = scaling.measure(point, chosen)
    assert found["point"] == {"batch": 2, "budget": 1.0, "width": 0.5, "image": 32}
    for taken in (*found["milliseconds"].values(), found["megabytes"]):
        assert set(taken) == {"static", "ours"}
        assert min(taken.values()) > 0


def test_committed_results_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    results.main([])
    shown = capsys.readouterr().out
    for result in results.committed():
        assert result.name in shown
        assert result.path.stem == f"{result.name}-{results.slug(result.machine)}"  # of the machine that made it
        assert result.rows


def test_pages_have_the_tables_of_all_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results"
    for facts in (AMD, INTEL):
        machine = {**results.machine(1), **facts}
        row = {
            **cases.SPEED[0].facts(str(facts["vector instructions"])),
            **speed.summary({"static": [2], "ours": [3]}, [2]),
        }
        results.write(folder / f"speed-1-{results.slug(facts)}.json", {"machine": machine, "rows": [row]})
    monkeypatch.setattr(page, "DOCS", tmp_path)
    text = "\n\n".join(page.sections("speed", list(results.committed(folder))))
    assert "**AMD EPYC, AVX2**" in text
    assert "| kw1x_resnet18 inference batch 1 | 2000 | 1.90 |  | 1.50 | 1.30 **missed** |" in text
    assert "| kw1x_resnet18 inference batch 1 | 2000 | 1.54 |  | 1.50 | 1.25 **missed** |" in text
    assert len([image for image in re.findall(r"\]\((images/.*)\)", text) if (tmp_path / image).exists()]) == 2
    filled = page.fill("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter", "speed", text)
    assert "old" not in filled
    assert page.fill(filled, "speed", text) == filled


def test_a_machine_of_another_kind_has_no_target() -> None:
    row = {**cases.SPEED[0].facts("DEFAULT"), **speed.summary({"static": [2], "ours": [3]}, [2])}
    (line,) = tables.ratios([row], "milliseconds").lines
    assert line[-1] == "no target"
    assert tables.verdict(1.25, 1.25) == "1.25 met"


def test_compiled_counts_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    compiled.main(["--preset", "kw1x_small_resnet", "--batch", "32"])
    static, plain, ours = map(float, re.findall(r"(\d+\.\d) MB", capsys.readouterr().out))
    assert static < ours < 1.25 * static  # the attentions
    assert plain > 3 * static


def test_detection_compares_detectors_with_the_static_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask_here(benchmark: str, options: list[str]) -> dict[str, Any]:
        """Processes of their own take their time to start, and `test_memory_...` has seen them."""
        assert benchmark == "detection"
        detection.main(options)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(child, "ask", ask_here)
    monkeypatch.setattr(speed, "WARM_UPS", 0)
    quick = ["--image", "64", "--batch", "2", "--seconds", "0", "--rounds", "1", "--steps", "1"]
    detection.main(["--preset", "kw1x_small_resnet", *quick, "--out", str(tmp_path / "out.json")])
    row, padded = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert padded["name"] == "kw1x_small_resnet, batch 2 at 64x64, padded"
    assert set(row["milliseconds"]) == set(row["megabytes"]) == {"static", "ours"}
    assert row["time ratio"] == pytest.approx(row["milliseconds"]["ours"] / row["milliseconds"]["static"], abs=0.01)
    [line] = tables.detection([row]).lines
    assert line[0] == "kw1x_small_resnet, batch 2 at 64x64, square"
    with pytest.raises(SystemExit, match="kw1x_resnet18 is not on resnet50"):
        detection.main(["--preset", "kw1x_resnet50", "kw1x_resnet18", *quick])


def test_padding_prints_a_line_for_every_backbone(capsys: pytest.CaptureFixture[str]) -> None:
    padding.main(["--backbones", "small_resnet", "kw1x_small_resnet", "--size", "48", "64", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[1] for line in lines[2:]] == ["small_resnet", "kw1x_small_resnet"]


def test_networks_that_infer_are_settled_and_do_not_fade() -> None:
    """Without statistics of its own, the last layers of this network see denormal numbers."""
    network = cases.converted_network("kw4x_mobilenetv2_100", 10)
    seen: list[float] = []
    network.get_submodule("conv_head").register_forward_pre_hook(lambda _, given: seen.append(float(given[0].std())))
    cases.runner(network, "ours", "inference", 2, 64, 10)()
    assert seen[-1] > 0.1
    assert not network.training
    momenta = {norm.momentum for norm in network.modules() if isinstance(norm, torch.nn.BatchNorm2d)}
    assert momenta == {torch.nn.BatchNorm2d(1).momentum}
