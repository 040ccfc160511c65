#!/usr/bin/env python3
"""What a server does with our cache and with llama.cpp's own, in short pieces.

    measure.py prepare  OSCAR MODEL --cache ours --slots 16 --context 4096 --folder F --text book.txt
    measure.py decode   OSCAR MODEL --cache ours --slots 16 --context 4096 --folder F
    measure.py mixed    OSCAR MODEL --cache ours --slots 16 --context 4096 --text book.txt
    measure.py figures  OSCAR MODEL --cache ours --cores 2-3 --text book.txt
    measure.py long     OSCAR MODEL --cache ours --cores 4-5 --text book.txt
    measure.py room     OSCAR MODEL --slots 16 --memory 1073741824
    measure.py table    RESULTS.jsonl

prepare computes --distinct prompts and saves them, untimed, so that decode can begin with full contexts:
all slots write --predict tokens at the same time. Slots with the same prompt share our pages, so ours is
measured with as many as slots; llama.cpp's own copies them and one is enough. Another prepare with a
larger --prompt goes on from what the last one saved, so that long prompts can be computed in pieces. mixed sends a prompt of nearly the whole context for each slot
at once and lets them be answered; figures is mixed with 16 slots of 4,096 tokens and two threads, long is
one slot of 32,768 with a prompt of 31,000. Runs can go beside each other, each on --cores of its own. room asks how many tokens fit. Caches: ours (2 bits), f16, q4_0
(llama.cpp's own, flash attention on). Each prints a line of JSON, and adds it to --out; table takes
medians over the lines of such a file.
"""
import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time

from serve_client import Failure, Server, check, make_texts, parse_cores, together

OWN = {"f16": [], "q4_0": ["-ctk", "q4_0", "-ctv", "q4_0"]}


def start(args, folder, *more):
    # Told this much, llama.cpp says how large its cache is.
    common = ["-np", str(args.slots), "-c", str(args.slots * args.context), "-t", str(args.threads), "--cache-ram", "0", "-lv", "4",
              "--slot-save-path", folder + "/", *more]
    log = os.path.join(folder, f"log-{args.cache}")
    # The folder may lie elsewhere than where the program was built.
    environment = {"OSCAR_LLAMA_BIN": args.llama_bin, "LD_LIBRARY_PATH": args.llama_bin} if args.llama_bin else {}
    how = {"environment": environment, "port": args.port, "cores": args.cores, "timeout_s": args.timeout, "wait_s": args.timeout}
    if args.cache == "ours":
        stats = os.path.join(folder, "stats")
        rotations = ["--rotations", args.rotations] if args.rotations else []
        return Server([args.oscar, "serve", args.model, *rotations, "--stats", stats, *common], log, stats=stats, **how)
    program = os.path.join(args.llama_bin, "llama-server")
    return Server([program, "-m", args.model, "-fit", "off", "-fa", "on", *OWN[args.cache], *common], log, **how)


def prompts_of(args, server):
    n = args.prompt or args.context - args.predict - 8
    prompts = [server.tokenize(text)[:n] for text in make_texts(args.text, args.distinct, args.context * 6, args.seed)]
    check(all(len(prompt) == n for prompt in prompts), f"the text gives {min(map(len, prompts))} tokens, {n} are wanted")
    return prompts


def slot_file(args, slot):
    return f"{args.cache}-{args.slots}x{args.context}-{slot}"


def cache_bytes(args, server):
    """Bytes that hold what the sequences hold: ours as allocated, llama.cpp's as it reserves them."""
    if args.cache == "ours":
        stats = server.stats()
        return stats['oscar_live_bytes{part="pages"}'] + stats['oscar_live_bytes{part="overlay"}']
    found = server.said(r"size =\s*([0-9.]+) MiB \(")
    check(found, "the server's log does not say how large its cache is")
    return int(float(found[1]) * (1 << 20))


def reserved_bytes(args, server):
    """The same with the room that is not used: ours with windows and scratch as well."""
    if args.cache != "ours":
        return cache_bytes(args, server)
    return sum(value for name, value in server.stats(settle=False).items() if name.startswith("oscar_reserved_bytes{"))


def prepare(args):
    with start(args, args.folder) as server:
        prompts = prompts_of(args, server)
        for slot, prompt in enumerate(prompts):
            if os.path.exists(os.path.join(args.folder, slot_file(args, slot))):
                server.slot(slot, "restore", slot_file(args, slot))
            server.complete(prompt, 1, id_slot=slot)
            status, reply = server.slot(slot, "save", slot_file(args, slot))
            check(status == 200, f"save: {status} {reply}")
        with open(os.path.join(args.folder, slot_file(args, "prompts")), "w", encoding="utf-8") as out:
            json.dump(prompts, out)
        return {"tokens": sum(map(len, prompts)), "cache_bytes": cache_bytes(args, server),
                "saved_bytes": sum(os.path.getsize(os.path.join(args.folder, slot_file(args, slot))) for slot in range(len(prompts)))}


def timed_stream(server, prompt, n_predict, slot):
    """Seconds of the first and the last token, and how many there were."""
    begin, times, known = time.monotonic(), [], 0
    for event in server.stream(prompt, n_predict, id_slot=slot, ignore_eos=True, cache_prompt=True):
        times.append(time.monotonic())
        if "timings" in event:
            known = event["timings"]["cache_n"]
    return {"begin": begin, "first": times[0], "last": times[-1], "tokens": n_predict, "known": known}


def decode(args):
    with open(os.path.join(args.folder, slot_file(args, "prompts")), encoding="utf-8") as file:
        saved = json.load(file)
    prompts = [saved[slot % len(saved)] for slot in range(args.slots)]
    with start(args, args.folder) as server:
        for slot in range(args.slots):
            status, reply = server.slot(slot, "restore", slot_file(args, slot % len(saved)))
            check(status == 200, f"restore: {status} {reply}")
        rows = together([lambda s=s: timed_stream(server, prompts[s], args.predict, s) for s in range(args.slots)])
        check(all(row["known"] >= len(prompts[0]) - 1 for row in rows), "a prompt was computed again")
        seconds = max(row["last"] for row in rows) - max(row["first"] for row in rows)
        tokens = sum(row["tokens"] for row in rows) - args.slots
        return {"tokens_per_second": tokens / seconds, "cache_bytes": cache_bytes(args, server), "peak_rss": server.memory()[1]}


def mixed(args):
    with tempfile.TemporaryDirectory() as folder, start(args, folder) as server:
        prompts = prompts_of(args, server)
        check(len(prompts) == args.slots, "mixed wants a prompt for each slot")
        rows = together([lambda s=s: timed_stream(server, prompts[s], args.predict, s) for s in range(args.slots)])
        seconds = max(row["last"] for row in rows) - min(row["begin"] for row in rows)
        waits = sorted(row["first"] - row["begin"] for row in rows)
        return {"tokens_per_second": (sum(map(len, prompts)) + args.slots * args.predict) / seconds, "seconds": seconds,
                "first_token_median_s": statistics.median(waits), "first_token_earliest_s": waits[0], "first_token_latest_s": waits[-1],
                "cache_bytes": cache_bytes(args, server), "reserved_bytes": reserved_bytes(args, server), "peak_rss": server.memory()[1]}


def long(args):
    """One sequence: its prompt, and then its answer at that depth."""
    with tempfile.TemporaryDirectory() as folder, start(args, folder) as server:
        prompt = prompts_of(args, server)[0]
        row = timed_stream(server, prompt, args.predict, 0)
        return {"prompt_seconds": row["first"] - row["begin"], "prompt_tokens_per_second": len(prompt) / (row["first"] - row["begin"]),
                "answer_tokens_per_second": (args.predict - 1) / (row["last"] - row["first"]), "tokens": len(prompt) + args.predict,
                "cache_bytes": cache_bytes(args, server), "reserved_bytes": reserved_bytes(args, server), "peak_rss": server.memory()[1]}


def room(args):
    """Tokens in --memory bytes: ours with windows and scratch, llama.cpp's by its bits."""
    args.cache = "ours"
    with tempfile.TemporaryDirectory() as folder:
        args.context = 1 << 20
        with start(args, folder, "--kv-memory", str(args.memory)) as server:
            found = server.said(r"^oscar: .* (\d+) pages for (\d+) tokens in [0-9.]+ MiB \(f16: ([0-9.]+) MiB\)")
            tokens, exact = int(found[2]), float(found[3]) * (1 << 20)
            a_slot = server.get("/slots")[1][0]["n_ctx"]
    a_token = exact / tokens
    return {"memory": args.memory, "ours": tokens, "ours_a_slot": a_slot, "f16": int(args.memory / a_token),
            "q4_0": int(args.memory / (a_token * 4.5 / 16))}


def table(path):
    """Medians of equal pieces."""
    groups = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            key = (row["piece"], row["model"], row["slots"], row["context"], row.get("prompt") or "full", row["cache"])
            groups.setdefault(key, []).append(row["result"])
    for key, results in groups.items():
        medians = {name: round(statistics.median(r[name] for r in results), 3) for name, value in results[0].items() if isinstance(value, (int, float))}
        print(*key, f"n={len(results)}", json.dumps(medians))


def main():
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(1))  # the server is stopped on the way out
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("piece", choices=("prepare", "decode", "mixed", "figures", "long", "room", "table"))
    parser.add_argument("oscar", help="the program; for table the file")
    parser.add_argument("model", nargs="?", help="path of a GGUF file")
    parser.add_argument("--cache", choices=("ours", "f16", "q4_0"), default="ours")
    parser.add_argument("--rotations")
    parser.add_argument("--llama-bin", help="folder of llama-server", default=os.environ.get("OSCAR_LLAMA_BIN", ""))
    parser.add_argument("--slots", type=int, help="(default: 16; long: 1)")
    parser.add_argument("--context", type=int, help="tokens a slot (default: 4096; long: 32768)")
    parser.add_argument("--distinct", type=int, help="different prompts (default: as many as slots)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: the context but for the answer)")
    parser.add_argument("--predict", type=int, default=32)
    parser.add_argument("--threads", type=int, help="(default: one for each core; figures and long: 2)")
    parser.add_argument("--cores", type=parse_cores, help="cores that the server runs on, as 0-3,6 (default: all)")
    parser.add_argument("--port", type=int, help="of the server (default: a free one)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a first token may take")
    parser.add_argument("--memory", type=int, default=1 << 30)
    parser.add_argument("--text", help="file that prompts are taken from")
    parser.add_argument("--folder", help="where prepare leaves what decode takes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="file that the result is added to")
    args = parser.parse_args()
    if args.piece == "table":
        table(args.oscar)
        return 0
    fixed = args.piece in ("figures", "long")
    args.slots = args.slots or (1 if args.piece == "long" else 16)
    args.context = args.context or (32768 if args.piece == "long" else 4096)
    args.prompt = args.prompt or (31000 if args.piece == "long" and args.context >= 32768 else None)
    args.threads = args.threads or (2 if fixed else os.cpu_count())
    args.distinct = args.distinct or args.slots
    try:
        result = {"prepare": prepare, "decode": decode, "mixed": mixed, "figures": mixed, "long": long, "room": room}[args.piece](args)
    except (Failure, OSError) as failure:
        print(f"measure: {failure}", file=sys.stderr)
        return 1
    row = {"piece": args.piece, "model": os.path.basename(args.model), "slots": args.slots, "context": args.context,
           "cache": args.cache, "threads": args.threads, "prompt": args.prompt, "predict": args.predict, "result": result}
    print(json.dumps(row))
    if args.out:
        with open(args.out, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
