"""``twinplane simulate`` as people run it, on the sample that ships."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from twinplane.cli.main import main
from twinplane.control_plane import simulator
from twinplane.control_plane.simulator import cells, devices, paper, traces, v1
from twinplane.control_plane.simulator.run import simulate as simulate_trace

SAMPLE = Path(simulator.__file__).parent / "samples/azure_conversations.csv"


def simulate(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def figures(capsys, *arguments: str) -> dict:
    code, out, err = simulate(capsys, "--trace", str(SAMPLE), "--json", *arguments)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_table_and_one_json_object_on_the_last_line(capsys):
    code, out, _ = simulate(capsys, "--trace", str(SAMPLE), "--device", "h100-llama-8b", "--json")
    assert code == 0
    *table, last = out.splitlines()
    assert table[0] == "azure_conversations.csv: 400 requests over 106 s on h100-llama-8b"
    assert table[1].split() == ["twinplane"]
    found = json.loads(last)["systems"]["twinplane"]
    assert found["requests"] == found["finished"] == 400 and found["refused"] == found["unfinished"] == 0
    assert 8 < found["itl_ms"]["p50"] < 12 and found["ttft_ms"]["p50"] < found["ttft_ms"]["p99"] <= found["ttft_ms"]["max"]
    assert 0 < found["kv_held_share"] <= found["kv_allocated_share"] < 1


def test_several_systems_beside_each_other(capsys):
    systems = ["twinplane", "prefill-first", "orca-oracle", "static"]
    arguments = [argument for system in systems for argument in ("--system", system)]
    found = figures(capsys, "--device", "h100-llama-8b", "--max-model-len", "8192", *arguments)["systems"]
    assert list(found) == systems
    assert found["twinplane"]["itl_ms"]["std"] < found["prefill-first"]["itl_ms"]["std"] / 2
    assert found["static"]["latency_per_token_ms"]["mean"] > found["twinplane"]["latency_per_token_ms"]["mean"]


def test_settings_come_from_the_command_line_then_the_file_then_the_device(capsys, tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("max-num-batched-tokens: 1024\nmax-chunk-tokens: 1024\n")
    base = ("--device", "h100-llama-8b", "--rate", "12")
    by_device = figures(capsys, *base)["systems"]["twinplane"]["itl_ms"]["max"]
    by_file = figures(capsys, *base, "--config", str(config))["systems"]["twinplane"]["itl_ms"]["max"]
    smaller = ("--max-num-batched-tokens", "300", "--max-chunk-tokens", "256")
    by_flag = figures(capsys, *base, "--config", str(config), *smaller)["systems"]["twinplane"]["itl_ms"]["max"]
    assert by_flag < by_device < by_file


def test_rate_limit_duration_and_seed(capsys):
    base = ("--device", "a100-opt-13b", "--rate", "2")
    found = figures(capsys, *base, "--limit", "50")["systems"]["twinplane"]
    assert found["requests"] == 50
    assert figures(capsys, *base, "--limit", "50")["systems"]["twinplane"]["duration_s"] == found["duration_s"]
    assert figures(capsys, *base, "--limit", "50", "--seed", "5")["systems"]["twinplane"]["duration_s"] != found["duration_s"]
    assert figures(capsys, *base, "--duration", "3")["systems"]["twinplane"]["unfinished"] > 0


def test_host_time_can_be_given(capsys):
    base = ("--device", "h100-llama-8b", "--overlap-depth", "1")
    without = figures(capsys, *base, "--host-us", "0:0")["systems"]["twinplane"]["itl_ms"]["p50"]
    with_it = figures(capsys, *base, "--host-us", "0:5000")["systems"]["twinplane"]["itl_ms"]["p50"]
    assert with_it == pytest.approx(without + 5, abs=0.6)


def test_fp8_kv_leaves_more_room(capsys):
    base = ("--device", "a100-opt-13b", "--rate", "50")
    full = figures(capsys, *base)["systems"]["twinplane"]
    half = figures(capsys, *base, "--kv-cache-dtype", "fp8_e4m3")["systems"]["twinplane"]
    assert half["running_mean"] > 1.3 * full["running_mean"]


def test_swap_space_is_used_where_it_is_cheaper_than_recomputing(capsys):
    base = ("--device", "a100-opt-13b", "--rate", "50")
    without = figures(capsys, *base)["systems"]["twinplane"]
    swapping = figures(capsys, *base, "--swap-space", "64GiB")["systems"]["twinplane"]
    assert without["preemptions"] > 0 and without["swapped_blocks"] == 0 and swapping["swapped_blocks"] > 0

    def result(**changes):
        run = paper.setup("a100-opt-13b")
        run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, **changes))
        return simulate_trace("twinplane", traces.load(SAMPLE, rate=50.0), run).raw

    recomputing, swapping = result(), result(swap_space=64 << 30)
    assert swapping["prompt_tokens_computed"] < recomputing["prompt_tokens_computed"]
    # In blocks of one token every copy is tiny, and computing again is cheaper.
    small = result(swap_space=64 << 30, block_size=1)
    assert small["preempted"] > 0 and small["blocks_swapped_out"] == 0


def test_swap_space_needs_a_device_model_that_knows_what_swapping_takes(capsys, tmp_path):
    content = json.loads((Path(devices.__file__).parent / "device_models" / "a100-opt-13b.json").read_text())
    del content["swap"]
    (tmp_path / "mine.json").write_text(json.dumps(content))
    arguments = ("--trace", str(SAMPLE), "--device", str(tmp_path / "mine.json"), "--swap-space", "1GiB")
    code, _, err = simulate(capsys, *arguments)
    assert code == 1 and "swap_space is 1073741824 bytes, but the model of a100-opt-13b has no `swap`" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "needs --trace FILE and --device NAME"),
        (["--trace", str(SAMPLE), "--device", "b200"], 1, "no device 'b200'"),
        (["--trace", "/nowhere.csv", "--device", "a100-opt-13b"], 1, "/nowhere.csv: can not be read"),
        (["--trace", str(SAMPLE), "--device", "a100-opt-13b", "--max-num-seqs", "x"], 78, "--max-num-seqs: expected an integer"),
        (["--trace", str(SAMPLE), "--device", "a100-opt-13b", "--max-num-seqs", "9000"], 78, "max-num-seqs is 9000 but"),
    ],
)
def test_mistakes_are_named(capsys, arguments, code, message):
    found, _, err = simulate(capsys, *arguments)
    assert found == code and message in err


@pytest.mark.parametrize(
    "arguments", [["--rate", "0"], ["--rate", "nan"], ["--limit", "0"], ["--host-us", "1:2:3"], ["--host-us", "5:1,3:2"], ["--system", "x"]]
)
def test_wrong_values_are_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    assert end.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_device_models_are_listed(capsys):
    code, out, _ = simulate(capsys, "--device", "list")
    assert code == 0 and "h100-llama-70b" in out


def test_a_picture(capsys, tmp_path):
    picture = tmp_path / "picture.png"
    arguments = ("--trace", str(SAMPLE), "--device", "h100-llama-8b", "--limit", "40", "--plot", str(picture))
    code, _, err = simulate(capsys, *arguments)
    if importlib.util.find_spec("matplotlib") is None:
        assert code == 1 and "pip install 'twinplane[plot]'" in err
    else:
        assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path):
    code = f"""
import sys
sys.modules["matplotlib"] = None
from twinplane.cli.main import main
sys.exit(main(["simulate", "--trace", {str(SAMPLE)!r}, "--device", "h100-llama-8b", "--limit", "9", "--plot", {str(tmp_path / "p.png")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install 'twinplane[plot]'" in done.stderr


def test_a_suite_without_its_traces_says_which_are_missing(capsys, tmp_path):
    code, out, _ = simulate(capsys, "v1", "--json", "--data", str(tmp_path))
    assert code == 0
    found = json.loads(out.splitlines()[-1])["cells"]
    missing = {cell["name"]: cell for cell in found if cell["verdict"] == "missing"}
    assert set(missing) == {group.name for group in v1.GROUPS if group.needs}
    assert all(cell["got"] is None for cell in missing.values())
    assert "azure2023_conv.csv" in missing["inter-token latency"]["source"]


def test_a_cached_prompt_of_8000_tokens_answers_within_a_decode_step():
    assert [cell.verdict for cell in v1.cached_prompt(cells.Data(None))] == ["ok", "ok"]


@pytest.mark.parametrize("suite", [paper, v1])
def test_groups_name_traces_that_exist(suite):
    for group in suite.GROUPS:
        assert set(group.needs) <= set(cells.FILES)


def test_cells_that_need_no_trace_are_measured():
    found = list(paper.swapping(cells.Data(None)))
    assert found[0].verdict == "ok" and len(found[0].got) == 3


def test_verdicts_can_go_either_way():
    assert cells.near("n", "s", 11.2, 10, share=0.12).verdict == "ok" and cells.near("n", "s", 11.3, 10, share=0.12).verdict == "short"
    assert cells.at_least("n", "s", 2.0, 2.0).verdict == "ok" and cells.at_least("n", "s", 1.9, 2.0).verdict == "short"
    assert cells.at_most("n", "s", 1.3, 1.3).verdict == "ok" and cells.at_most("n", "s", 1.4, 1.3).verdict == "short"
    assert cells.between("n", "s", 1.6, 1.7, 2.7).verdict == "short" and cells.between("n", "s", 3.0, 1.7, 2.7).verdict == "ok"


def test_a_fair_share_shields_a_tenant_from_another_ones_flood(capsys, tmp_path):
    flood = [{"arrival_s": 0.0, "prompt_tokens": 500, "output_tokens": 50, "tenant": "loud"} for _ in range(600)]
    quiet = [{"arrival_s": 1.0 + i, "prompt_tokens": 500, "output_tokens": 50, "tenant": "quiet"} for i in range(5)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, flood + quiet)))
    base = ("--trace", str(path), "--device", "h100-llama-8b", "--max-num-seqs", "32", "--json")

    def quiet_ttft_ms(policy: str) -> float:
        code, out, err = simulate(capsys, *base, "--policy", policy)
        assert code == 0, err
        tenants = json.loads(out.splitlines()[-1])["systems"]["twinplane"]["tenants"]
        assert tenants["loud"]["requests"] == 600 and tenants["quiet"]["output_tokens"] == 250
        return tenants["quiet"]["ttft_ms"]["max"]

    assert quiet_ttft_ms("fair") < quiet_ttft_ms("fcfs") / 5
