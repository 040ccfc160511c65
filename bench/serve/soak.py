#!/usr/bin/env python3
"""A server under many clients that do everything at once, for as long as wanted.

Starts `oscar serve` and lets clients send requests of random lengths, leave in the prompt or after some
chunks, send what is not valid or too long, and save, restore and erase slots. Known prompts, whose
answers were taken alone before, come between the others and must be answered the same (a difference is
printed with the gap between the two tokens, and must be a near tie; at most a tenth may differ). No other request begins with a
known prompt: to go back to it by more than the lookahead is the one case in which a token may see less
than after computing the prompt (docs/SERVER.md). Each client has a word of its own
in its prompts; no answer may hold another's. Meanwhile memory and pages are watched.

    bench/serve/soak.py build/oscar smollm2-135m --seconds 1800 --clients 16 --text book.txt

Exit code 0: every answer was valid, pages added up in every sample, memory stayed below what was
reserved, and (in runs of five minutes and more) did not grow after warm-up. 1: not so. 2: usage.
"""
import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time

from serve_client import Failure, Server, check, make_texts, pages_add_up, parse_cores, same_tokens

N_KNOWN = 12
MIB = 1 << 20


class Soak:
    def __init__(self, server, args, folder):
        self.server, self.args, self.folder = server, args, folder
        self.counts = {}
        self.lock = threading.Lock()
        self.failures = []
        self.parted = 0
        self.samples = []  # (seconds, resident bytes, peak, pages by state)
        self.stop = threading.Event()
        self.words = [f"zq{random.Random(f'{args.seed} {i}').randrange(10**7):07d}" for i in range(args.clients)]
        self.context = server.get("/slots")[1][0]["n_ctx"]
        texts = make_texts(args.text, 64 + N_KNOWN, 6000, args.seed)
        self.texts, self.known_texts = texts[N_KNOWN:], ["Here is a text: " + text for text in texts[:N_KNOWN]]

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def prepare(self):
        """Known prompts and their answers alone."""
        generator = random.Random(self.args.seed)
        self.known = []
        for i in range(N_KNOWN):
            prompt = self.server.tokenize(self.known_texts[i])[: generator.randrange(20, self.context // 2)]
            reply = self.server.complete(prompt, 16, cache_prompt=False)
            self.known.append((prompt, reply["tokens"]))

    # ---------------------------------------------------------------------- what clients do

    def ask(self, client, generator):
        word = self.words[client]
        prefix = "You are a helpful assistant. " * 8 if generator.random() < 0.5 else ""
        text = prefix + f"The word is {word}. " + generator.choice(self.texts)
        prompt = self.server.tokenize(text)[: generator.randrange(10, int(self.context * 0.8))]
        n = generator.randrange(1, 48)
        hot = generator.random() < 0.3
        reply = self.server.complete(prompt, n, temperature=generator.choice((0.7, 2.0)) if hot else 0,
                                     seed=generator.randrange(1 << 30), cache_prompt=generator.random() < 0.8)
        check(reply["stop_type"] in ("limit", "eos") and 0 <= reply["tokens_predicted"] <= n, f"an answer of {reply['tokens_predicted']} of {n} tokens, {reply['stop_type']}")
        check(reply["tokens_predicted"] == n or reply["stop_type"] == "eos" or reply["truncated"], f"an answer ended early: {str(reply)[:300]}")
        for other in self.words:
            check(other == word or other not in reply["content"], f"client {client} was told the word of another client")
        self.count("asked")

    def ask_known(self, client, generator):
        prompt, expected = generator.choice(self.known)
        reply = self.server.complete(prompt, len(expected), cache_prompt=generator.random() < 0.5)
        if not same_tokens(self.server, prompt, expected, reply["tokens"], f"client {client}, a known prompt of {len(prompt)} tokens"):
            with self.lock:
                self.parted += 1
        self.count("known")

    def leave(self, client, generator):
        text = self.server.tokenize(generator.choice(self.texts))[: generator.randrange(10, int(self.context * 0.8))]
        self.server.abandon(text, generator.random() * 1.5, generator.random() < 0.5)
        self.count("left")

    def leave_stream(self, client, generator):
        events = self.server.stream(self.server.tokenize(generator.choice(self.texts))[:60], 100)
        for _ in range(generator.randrange(1, 6)):
            if next(events, None) is None:
                break
        events.close()
        self.count("left a stream")

    def send_bad(self, client, generator):
        body = generator.choice(({"prompt": [-1]}, {"prompt": {"a": 1}}, {"prompt": "a", "n_predict": "x"}, b"{", b'{"prompt": "\xc4\xe3"}',
                                 {"prompt": [1] * (self.context + 1), "n_predict": 1}))
        status, reply = self.server.post("/completion", body)
        check(status in (400, 422, 500) and isinstance(reply, dict) and "error" in reply, f"a bad request: {status} {str(reply)[:200]}")
        self.count("bad")

    def use_slot(self, client, generator):
        slot = generator.randrange(self.args.slots)
        name = f"client{client}"
        action = generator.choice(("save", "restore", "restore", "erase"))
        status, reply = self.server.slot(slot, action, name)
        missing = action == "restore" and not os.path.exists(os.path.join(self.folder, name))
        check(status == 200 or (missing and status == 400), f"slot {slot} {action}: {status} {reply}")
        self.count(action)

    def client(self, number):
        generator = random.Random(f"{self.args.seed} client {number}")
        kinds, weights = (self.ask, self.ask_known, self.leave, self.leave_stream, self.send_bad, self.use_slot), (40, 20, 12, 8, 10, 10)
        while not self.stop.is_set():
            kind = generator.choices(kinds, weights)[0]
            try:
                kind(number, generator)
            except Exception as failure:  # of any kind ends the soak
                with self.lock:
                    self.failures.append(f"{kind.__name__} of client {number}: {failure!r}")
                self.stop.set()

    # ---------------------------------------------------------------------- watching

    def watch(self, begin):
        while not self.stop.is_set():
            try:
                states = pages_add_up(self.server.stats(settle=False))
                self.samples.append((time.monotonic() - begin, *self.server.memory(), states))
            except Exception as failure:
                with self.lock:
                    self.failures.append(f"watching: {failure!r}")
                self.stop.set()
            self.stop.wait(2)

    def run(self):
        begin = time.monotonic()
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(self.args.clients)]
        threads.append(threading.Thread(target=self.watch, args=(begin,)))
        for thread in threads:
            thread.start()
        self.stop.wait(self.args.seconds)
        self.stop.set()
        for thread in threads:
            thread.join()
        return time.monotonic() - begin

    def drain(self):
        """Afterwards nothing is held."""
        self.server.wait_idle(60)
        for slot in range(self.args.slots):
            check(self.server.slot(slot, "erase")[0] == 200, f"slot {slot} was not erased")
        stats = self.server.stats()
        states = pages_add_up(stats)
        check(states['oscar_pages{state="live"}'] == 0 and stats["oscar_tokens_held"] == 0, f"held after the end: {states}")
        check(stats['oscar_calls_total{result="error"}'] == 0, "calls failed")
        prompt, expected = self.known[0]
        same_tokens(self.server, prompt, expected, self.server.complete(prompt, len(expected), cache_prompt=False)["tokens"], "at the end")
        return stats


def judge_memory(samples, limit, sanitized):
    """Resident memory below the limit, and flat: the last third against the second."""
    peak = max(sample[2] for sample in samples)
    check(sanitized or peak <= limit, f"the server took {peak / MIB:.0f} MiB, at most {limit / MIB:.0f} MiB were expected")
    third = len(samples) // 3
    middle, last = ([sample[1] for sample in part] for part in (samples[third : 2 * third], samples[2 * third :]))
    grown = statistics.median(last) - statistics.median(middle)
    if samples[-1][0] >= 300 and not sanitized:
        check(grown <= max(8 * MIB, 0.01 * statistics.median(middle)), f"memory grew by {grown / MIB:.1f} MiB after warm-up")
    return peak, grown


def main():
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(1))  # the server is stopped on the way out
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("oscar", help="the program")
    parser.add_argument("model")
    parser.add_argument("--rotations")
    parser.add_argument("--text", required=True, help="file that prompts are taken from")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="tokens a slot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cores", type=parse_cores, help="cores that the server runs on, as 0-3,6")
    parser.add_argument("--port", type=int, help="of the server (default: a free one)")
    parser.add_argument("--sanitized", action="store_true", help="a build whose memory is a sanitizer's too: it is not judged")
    parser.add_argument("--json", help="file for the result and all samples")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        command = [args.oscar, "serve", args.model, "--stats", os.path.join(folder, "stats"), "-t", str(args.threads),
                   "-np", str(args.slots), "-c", str(args.slots * args.context), "--cache-ram", "32", "--slot-save-path", folder + "/"]
        if args.rotations:
            command[3:3] = ["--rotations", args.rotations]
        # What 16 threads allocate and free does not scatter over as many arenas.
        environment = {"MALLOC_ARENA_MAX": "4"}
        print(f"seed {args.seed}", flush=True)
        try:
            with Server(command, os.path.join(folder, "log"), environment, os.path.join(folder, "stats"), port=args.port, cores=args.cores) as server:
                soak = Soak(server, args, folder)
                before = server.memory()[0]
                soak.prepare()
                reserved = sum(v for k, v in server.stats().items() if k.startswith("oscar_reserved_bytes{"))
                seconds = soak.run()
                if soak.failures:
                    raise Failure("; ".join(soak.failures[:5]))
                stats = soak.drain()
                # The prompt cache in RAM, and what requests and outputs of this many clients take.
                check(soak.parted <= 0.1 * soak.counts.get("known", 0), f"{soak.parted} of {soak.counts.get('known', 0)} known answers part")
                peak, grown = judge_memory(soak.samples, before + reserved + 32 * MIB + args.clients * 8 * MIB + 64 * MIB,
                                           args.sanitized)
                server.stop()
        except Failure as failure:
            print(f"soak: {failure}")
            log = os.path.join(folder, "log")
            if os.path.exists(log):
                with open(log, encoding="utf-8", errors="replace") as file:
                    print("".join(file.readlines()[-15:]))
            return 1
        summary = {"seconds": round(seconds), "clients": args.clients, "seed": args.seed, "requests": soak.counts,
                   "known_parted_at_near_ties": soak.parted, "samples": len(soak.samples), "peak_rss": peak,
                   "grown_after_warm_up": grown, "reserved": reserved,
                   "page_hits": stats["oscar_page_hits_total"], "page_evictions": stats['oscar_evictions_total{part="pages"}'],
                   "no_slot": stats['oscar_calls_total{result="no_slot"}']}
        print(json.dumps(summary))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as out:
                json.dump({**summary, "all_samples": soak.samples}, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
