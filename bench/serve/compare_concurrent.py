#!/usr/bin/env python3
"""The same greedy requests alone and all at once, compared token by token.

A running llama-server answers each request alone, then all of them at the same time. Where the two
answers part, the tool prints the gap between the two best log-probabilities of both runs at that
token, and by how much log-probabilities moved before it. Kernels sum in another order for other
batch sizes, so a gap of about that movement is a tie that either run may settle its own way; a
larger one is a fault.

    oscar serve smollm2-135m -np 8 -c 8192 --metrics &
    bench/serve/compare_concurrent.py http://127.0.0.1:8080 --text book.txt --json result.json

Exit code 0: all answers are equal or part at near ties. 1: one parts at more. 2: usage, no server.
"""
import argparse
import json
import random
import sys
import threading
import urllib.error
import urllib.request

QUESTIONS = [
    "Explain in a few sentences how a refrigerator works.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List five facts about the planet Mars.",
    "What is the difference between a virus and a bacterium?",
    "Describe the taste of an orange to somebody who never had one.",
    "How do I bake bread without yeast?",
    "Summarise the causes of the First World War.",
    "Write a Python function that returns the n-th Fibonacci number.",
]


def post(url, body):
    request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as reply:
        return json.load(reply)


def answer(url, prompt, args):
    """[(token, {token: log-probability of the best ones})] of one greedy answer."""
    body = {"prompt": prompt, "n_predict": args.n_predict, "temperature": 0, "n_probs": args.n_probs, "cache_prompt": False}
    reply = post(url, body)
    tokens = []
    for entry in reply["completion_probabilities"]:
        tokens.append((entry["id"], {best["id"]: best["logprob"] for best in entry["top_logprobs"]}))
    return tokens


def together(url, prompts, args):
    answers = [None] * len(prompts)
    failures = []
    start = threading.Barrier(len(prompts))

    def work(i):
        try:
            start.wait()
            answers[i] = answer(url, prompts[i], args)
        except (OSError, KeyError, ValueError) as failure:
            failures.append(f"request {i}: {failure}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError("; ".join(failures))
    return answers


def busy_slots(url):
    """Slots a decode served on average so far (llama-server --metrics), or None."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=60) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith("llamacpp:n_busy_slots_per_decode"):
                    return float(line.split()[-1])
    except OSError:
        pass
    return None


def gap(best):
    first, second = sorted(best.values(), reverse=True)[:2]
    return first - second


def compare(alone, other):
    """Where two answers part, and how far log-probabilities of the common part moved."""
    moved = []
    for i, ((a, best_a), (b, best_b)) in enumerate(zip(alone, other)):
        # Tokens that both runs list: the contexts are equal up to here.
        moved.append(max(abs(best_a[t] - best_b[t]) for t in best_a if t in best_b))
        if a != b:
            return {"equal": False, "token": i, "gap_alone": gap(best_a), "gap_together": gap(best_b),
                    "moved_here": moved[-1], "moved_before": max(moved[:-1], default=0.0)}
    return {"equal": len(alone) == len(other), "token": len(alone), "moved_before": max(moved, default=0.0)}


def make_prompts(args):
    generator = random.Random(args.seed)
    text = open(args.text, encoding="utf-8").read() if args.text else ""
    prompts = []
    for i in range(args.requests):
        question = f"<|im_start|>user\n{QUESTIONS[i % len(QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n"
        if text:
            length = generator.randrange(args.min_chars, args.max_chars)
            begin = generator.randrange(max(1, len(text) - length))
            question = text[begin : begin + length] + "\n" + question
        prompts.append(question)
    return prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", help="of a llama-server with as many slots as requests")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="how often all are sent at once")
    parser.add_argument("--n-predict", type=int, default=64)
    parser.add_argument("--n-probs", type=int, default=10)
    parser.add_argument("--text", help="file that prompts begin with pieces of")
    parser.add_argument("--min-chars", type=int, default=200)
    parser.add_argument("--max-chars", type=int, default=3000)
    parser.add_argument("--near-tie", type=float, default=0.05, help="largest gap that is a tie, in nats")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="file for the result")
    args = parser.parse_args()

    prompts = make_prompts(args)
    rows = []
    try:
        alone = [answer(args.url, prompt, args) for prompt in prompts]
        again = [answer(args.url, prompt, args) for prompt in prompts[:2]]
        repeatable = all(compare(a, b)["equal"] for a, b in zip(alone, again))
        for number in range(args.rounds):
            for i, other in enumerate(together(args.url, prompts, args)):
                rows.append({"round": number, "request": i, **compare(alone[i], other)})
    except (OSError, urllib.error.URLError, RuntimeError, KeyError) as failure:
        print(f"compare_concurrent: {failure}", file=sys.stderr)
        return 2

    busy = busy_slots(args.url)
    parted = [row for row in rows if not row["equal"]]
    for row in parted:
        row["near_tie"] = max(row["gap_alone"], row["gap_together"]) <= args.near_tie
        print(f"request {row['request']} parts at token {row['token']}: gap {row['gap_alone']:.4f} alone, "
              f"{row['gap_together']:.4f} together; log-probabilities moved by {row['moved_before']:.4f} before, "
              f"{row['moved_here']:.4f} here{'' if row['near_tie'] else '  <- NOT a near tie'}")
    faults = [row for row in parted if not row["near_tie"]]
    moved = max((row["moved_before"] for row in rows), default=0.0)
    print(f"{len(rows) - len(parted)} of {len(rows)} answers equal, {len(parted) - len(faults)} part at near ties, "
          f"{len(faults)} at more; log-probabilities of equal contexts moved by up to {moved:.4f}; "
          f"alone twice: {'equal' if repeatable else 'NOT equal'}"
          + (f"; {busy:.2f} slots a decode over both" if busy else ""))
    if args.json:
        summary = {"answers": len(rows), "equal": len(rows) - len(parted), "near_ties": len(parted) - len(faults),
                   "faults": len(faults), "moved": moved, "repeatable": repeatable,
                   "busy_slots_per_decode": busy, "near_tie": args.near_tie,
                   "seed": args.seed, "n_predict": args.n_predict, "rows": rows}
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(summary, out, indent=1)
            out.write("\n")
    return 1 if faults or not repeatable else 0


if __name__ == "__main__":
    sys.exit(main())
