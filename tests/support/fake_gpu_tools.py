"""nvidia-smi, rocm-smi and amd-smi of a test's machine: they answer from a JSON file, and refuse what the real ones refuse.

Run as `python fake_gpu_tools.py STATE TOOL ARGUMENTS`; STATE is rewritten by what sets clocks. Standard library only.
"""

import json
import os
import sys
import time


def nvidia_smi(state, arguments):
    if state.get("hangs"):
        time.sleep(30)
    if state.get("ends"):
        return state["ends"], state.get("says", "")
    first = arguments[0]
    if first == "--list-gpus":
        lost = [state["lost"]] if state.get("lost") else []
        return 0, "\n".join(
            [*(f"GPU {g['index']}: {g['name']} (UUID: GPU-{g['index']})" for g in state["gpus"]), *lost]
        )
    if first.startswith("--query-"):
        table, _, asked = first.removeprefix("--query-").partition("=")
        assert arguments[1] in ("--format=csv,noheader,nounits", "--format=csv,noheader"), arguments
        return query(state["gpus" if table == "gpu" else table], asked.split(","))
    if arguments == ["nvlink", "--status"]:
        return 0, state["nvlink"]
    if first == "-i" and arguments[2] == "-ac":
        return set_clocks(state, arguments[1], arguments[3])
    raise AssertionError(f"nvidia-smi has no {arguments}")


def query(rows, asked):
    for field in asked:
        if rows and field not in rows[0]:
            return 2, f'Field "{field}" is not a valid field to query.\n'
    return 0, "\n".join(", ".join(row[field] for field in asked) for row in rows)


def set_clocks(state, index, clocks):
    if state.get("no_rights") and "SUDO" not in os.environ:
        return 4, "The current user does not have permission to change clocks: Insufficient Permissions\n"
    gpu = next(gpu for gpu in state["gpus"] if gpu["index"] == index)
    memory, graphics = clocks.split(",")
    if not state.get("forgets"):
        gpu |= {"clocks.applications.memory": memory, "clocks.applications.graphics": graphics}
    return 0, f'Applications clocks set to "(MEM {memory}, SM {graphics})" for GPU {gpu["pci.bus_id"]}\nAll done.'


def rocm_smi(state, arguments):
    assert arguments == ["--showid", "--json"], arguments
    cards = {f"card{n}": {"Device Name": "AMD Instinct MI300X VF", "GUID": str(n)} for n in range(state["cards"])}
    return 0, "WARNING: AMD GPU device(s) is/are in a low-power state\n" + json.dumps(cards)


def amd_smi(state, arguments):
    assert arguments == ["metric", "--power", "--json"], arguments
    states = state.get("throttle", ["UNTHROTTLED"] * state["cards"])
    return 0, json.dumps([{"gpu": n, "power": {"throttle_status": said}} for n, said in enumerate(states)])


if __name__ == "__main__":
    path, tool, *arguments = sys.argv[1:]
    with open(path) as file:
        state = json.load(file)
    code, said = globals()[tool.replace("-", "_")](state, arguments)
    if "-ac" in arguments:
        with open(path, "w") as file:
            json.dump(state, file)
    print(said)
    sys.exit(code)
