#!/usr/bin/env python3
"""What clients do to a server, one case a function; every answer is compared with the same request
alone, by tokens and log-probabilities.

usage: serve_cases.py WORK_FOLDER OSCAR MODEL ROTATIONS TEXT [CASE...]
"""
import http.client
import json
import os
import re
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "serve"))
from serve_client import (Failure, Server, check, make_texts, pages_add_up, same_answers,  # noqa: E402
                          same_tokens, together)

WORK, OSCAR, MODEL, ROTATIONS, TEXT = sys.argv[1:6]
SEED = 20
n_servers = 0


def serve(*arguments, stats=True):
    global n_servers
    n_servers += 1
    name = os.path.join(WORK, f"server{n_servers}")
    command = [OSCAR, "serve", MODEL, "--rotations", ROTATIONS, "-t", "1", *arguments]
    if stats:
        command[5:5] = ["--stats", name + ".prom"]
    return Server(command, name + ".log", stats=name + ".prom")


def ended(server):
    """Stops it and checks what every server has to hold to."""
    server.stop()
    with open(server.log + ".out", encoding="utf-8", errors="replace") as file:
        check("oscar" not in file.read(), "something of ours is on the server's standard output")
    check(server.stats(settle=False)["oscar_up"] == 0, "the statistics say that an ended server is up")


def texts(server, n, tokens, seed=SEED):
    """n prompts of exactly so many tokens."""
    return [server.tokenize(text)[:tokens] for text in make_texts(TEXT, n, tokens * 8, seed)]


def start_line(server):
    first = server.said(r"^oscar: 2-bit KV cache on .*: [0-9.]+ bits an element, \d+ \+ \d+ tokens in BF16; "
                        r"(\d+) pages for (\d+) tokens ")
    check(first, "the start line does not say bits, windows, pages and tokens")
    check(int(first[2]) == 64 * int(first[1]), f"{first[1]} pages and {first[2]} tokens in the start line")
    check(server.said(r"^oscar: KV cache of \d+ sequences?.* of up to \d+ tokens.*rotations of .*, fitted .* on \d+ tokens"),
          "the start line does not name the rotations and their date")


def case_requests():
    """n > 1, cancels, erase, bad requests, a full context, save and restart: one server."""
    slots = os.path.join(WORK, "slots")
    os.makedirs(slots, exist_ok=True)
    with serve("-np", "4", "-c", "8192", "--cache-ram", "0", "--slot-save-path", slots + "/") as server:
        start_line(server)
        prompts = texts(server, 4, 150)
        alone = [server.answer(p, 24, cache_prompt=False) for p in prompts]
        several(server, prompts, alone)
        cancels(server, prompts, alone)
        bad_requests(server, prompts, alone)
        full_context(server, prompts, alone)
        saved = server.answer(prompts[2], 24, id_slot=2, cache_prompt=True)
        same_answers(alone[2], saved, "before a save")
        check(server.slot(2, "save", "two")[0] == 200, "a slot was not saved")
        erase_all(server)
        ended(server)
    with serve("-np", "4", "-c", "8192", "--cache-ram", "0", "--slot-save-path", slots + "/") as server:
        check(server.slot(1, "restore", "two")[0] == 200, "a slot was not restored by the next server")
        longer = prompts[2] + [token for token, _ in alone[2]][:-1]
        reply = server.complete(longer, 1, id_slot=1, cache_prompt=True)
        check(reply["timings"]["cache_n"] >= len(longer) - 2, f"after a restart {reply['timings']['cache_n']} of {len(longer)} tokens are known")
        check(reply["tokens"][0] == alone[2][-1][0], "another token after a restart")
        same_answers(alone[2], server.answer(prompts[2], 24, id_slot=1, cache_prompt=True), "after a restart")
        check(server.stats()['oscar_states_total{result="restored"}'] == 1, "the restored state was not counted")
        ended(server)


def several(server, prompts, alone):
    """Three answers of one prompt (copies of its sequence) beside another request."""
    expected = [token for token, _ in alone[0]]
    three, other = together([lambda: server.complete(prompts[0], 24, n_cmpl=3, cache_prompt=False),
                             lambda: server.answer(prompts[1], 24, cache_prompt=False)])
    check(isinstance(three, list) and len(three) == 3, f"n_cmpl 3: {str(three)[:200]}")
    for i, reply in enumerate(three):
        same_tokens(server, prompts[0], expected, reply["tokens"], f"answer {i} of three")
    same_answers(alone[1], other, "beside three answers")


def cancels(server, prompts, alone):
    """Clients that go away in the prompt, after some chunks, and without streaming."""
    long_prompt = texts(server, 1, 1900, SEED + 1)[0]

    def leave(after_s, stream):
        server.abandon(long_prompt, after_s, stream, cache_prompt=False)
        server.abandon(prompts[3], after_s, stream, cache_prompt=False)

    for after_s, stream in ((0.15, False), (0.6, True), (1.2, False)):
        _, beside = together([lambda: leave(after_s, stream), lambda: server.answer(prompts[1], 24, cache_prompt=False)])
        same_answers(alone[1], beside, "beside clients that leave")
        server.wait_idle(30)
    events = server.stream(prompts[0], 200)
    for _ in range(3):
        next(events)
    events.close()
    server.wait_idle(30)
    same_answers(alone[0], server.answer(prompts[0], 24, cache_prompt=False), "after clients that left")
    pages_add_up(server.stats())


BAD = [
    {"prompt": "a", "temperature": "hot"}, {"prompt": {"a": 1}}, {"prompt": [999999999]}, {"prompt": [-1]},
    {"prompt": "a", "n_predict": "many"}, {"prompt": "a", "logit_bias": 7, "stream": "true"}, {}, [],
    {"prompt": "a", "grammar": "root ::= ("},
]


def bad_requests(server, prompts, alone):
    """Refused with an error in JSON while another request goes on."""

    def send_all():
        for body in BAD + [b"", b"{", b'{"prompt": "\xc4\xe3"}', b'{"prompt": "\xc0\x80"}']:
            status, reply = server.post("/completion", body)
            check(status in (400, 422, 500) and isinstance(reply, dict) and "error" in reply, f"{str(body)[:60]}: {status} {str(reply)[:200]}")

    _, beside = together([send_all, lambda: server.answer(prompts[1], 24, cache_prompt=False)])
    same_answers(alone[1], beside, "beside bad requests")
    check(server.get("/health")[0] == 200, "the server is not healthy after bad requests")


def full_context(server, prompts, alone):
    """A prompt that is too long is refused with both sizes; one that reaches the end stops there."""
    size = server.get("/slots")[1][0]["n_ctx"]
    text = texts(server, 1, size + 10, SEED + 2)[0]
    check(len(text) == size + 10, "the text is too short for this test")
    status, reply = server.post("/completion", {"prompt": text, "n_predict": 4})
    check(status == 400 and reply["error"]["type"] == "exceed_context_size_error" and reply["error"]["n_ctx"] == size,
          f"a prompt of {len(text)} tokens: {status} {reply}")
    last, beside = together([lambda: server.complete(text[: size - 5], 50, cache_prompt=False, ignore_eos=True),
                             lambda: server.answer(prompts[1], 24, cache_prompt=False)])
    check(last["stop_type"] == "limit" and last["truncated"] and 4 <= last["tokens_predicted"] <= 6,
          f"at the context's end: {last['stop_type']}, {last['tokens_predicted']} tokens")
    same_answers(alone[1], beside, "beside a full context")


def erase_all(server):
    n_slots = len(server.get("/slots")[1])
    for slot in range(n_slots):
        check(server.slot(slot, "erase")[0] == 200, f"slot {slot} was not erased")
    stats = server.stats()
    pages_add_up(stats)
    check(stats['oscar_pages{state="live"}'] == 0 and stats["oscar_tokens_held"] == 0, f"pages after all slots were erased: {stats}")
    check(stats['oscar_live_bytes{part="overlay"}'] == 0, "overlay pages after all slots were erased")


def case_many():
    """64 slots, all busy at once."""
    n = 64
    with serve("-np", str(n), "-c", str(n * 256), "--cache-ram", "0") as server:
        prompts = texts(server, n, 40)
        alone = [server.answer(p, 8, cache_prompt=False) for p in prompts]
        found = together([lambda p=p: server.answer(p, 8, cache_prompt=False) for p in prompts])
        moved = max(same_answers(a, b, f"request {i} of {n}") for i, (a, b) in enumerate(zip(alone, found)))
        print(f"{n} slots: log-probabilities moved by up to {moved:.4f}")
        pages_add_up(server.stats())
        ended(server)


def case_shared():
    """Eight slots with the same beginning hold its full pages once."""
    n, n_same = 8, 640
    with serve("-np", str(n), "-c", str(n * 1024), "--cache-ram", "0", "--slot-save-path", WORK + "/") as server:
        same = texts(server, 1, n_same, SEED + 4)[0]
        prompts = [same + own for own in texts(server, n, 30)]
        alone = [server.answer(p, 12, cache_prompt=False) for p in prompts]
        erase_all(server)
        found = together([lambda i=i: server.answer(prompts[i], 12, cache_prompt=False, id_slot=i) for i in range(n)])
        for i in range(n):
            same_answers(alone[i], found[i], f"request {i} on shared pages")
        stats = server.stats()
        live, shared, unequal = stats['oscar_pages{state="live"}'], stats["oscar_pages_shared"], stats["oscar_pages_unequal_total"]
        print(f"{n} x {n_same} equal tokens: {live} pages live, {shared} shared, {unequal} computed with other bits")
        # Where products are rounded by the batch they are in, equal tokens have rows of their own.
        if unequal == 0:
            check(live == n_same // 64 + n and shared == n_same // 64, f"{live} pages live and {shared} shared, expected {n_same // 64 + n} and {n_same // 64}")
        pages_add_up(stats)
        ended(server)


def case_turns():
    """B17, B16: a conversation in micro-batches of 64 tokens; each turn knows all before it, and is answered as
    the same text computed at once. B12: the end of the context ends an answer, also with --context-shift."""
    with serve("-np", "2", "-c", "2048", "-b", "64", "-ub", "64", "--cache-ram", "0", "--context-shift") as server:
        said, known = [], 0
        for turn, words in enumerate(texts(server, 3, 110)):
            said += words
            cold = server.answer(said, 20, cache_prompt=False, id_slot=1)
            warm = server.complete(said, 20, cache_prompt=True, id_slot=0)
            check(warm["timings"]["cache_n"] >= known - 1, f"turn {turn}: {warm['timings']['cache_n']} tokens are known, expected {known - 1}")
            same_tokens(server, said, [token for token, _ in cold], warm["tokens"], f"turn {turn}, warm")
            said += warm["tokens"]
            known = len(said)
        prompt = texts(server, 1, 1000, SEED + 6)[0]
        last = server.complete(prompt, 200, ignore_eos=True, cache_prompt=False)
        check(last["stop_type"] == "limit" and last["truncated"] and 20 <= last["tokens_predicted"] <= 30,
              f"past the context: {last['stop_type']}, {last['tokens_predicted']} tokens")
        same_answers(cold, server.answer(said[:-20], 20, cache_prompt=False), "after the context was full")
        ended(server)


def chat(server, text, **options):
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, **options}
    status, reply = server.post("/v1/chat/completions", body)
    check(status == 200 and "choices" in reply, f"/v1/chat/completions: {status} {str(reply)[:300]}")
    return reply


def chat_events(server, **options):
    """Status and the events of a streamed chat."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"messages": [{"role": "user", "content": "Name a color."}], "temperature": 0, "max_tokens": 5, "stream": True, **options}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        lines = [line[6:].strip() for line in reply.read().split(b"\n") if line.startswith(b"data: ")]
        return reply.status, [json.loads(line) for line in lines if line != b"[DONE]"], lines.count(b"[DONE]")
    finally:
        connection.close()


def case_api():
    """What clients of OpenAI's API rely on (C03 to C18), of the unmodified server on this cache."""
    with serve("-np", "4", "-c", "2048", "--cache-ram", "0") as server:
        one = chat(server, "Name a color.", max_tokens=1)
        check(one["choices"][0]["finish_reason"] == "length" and one["usage"]["completion_tokens"] == 1, f"C05: {one}")
        usage = chat(server, "Name a color.")["usage"]
        check(usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"], f"C04: {usage}")
        check(usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1, f"G06: {usage}")
        for wanted in (True, False):
            status, events, done = chat_events(server, **({"stream_options": {"include_usage": True}} if wanted else {}))
            check(status == 200 and done == 1, f"C04: {status}, {done} [DONE]")
            check((not events[-1]["choices"] and events[-1]["usage"]["completion_tokens"] == 5) == wanted, f"C04: {events[-1]}")
            check(all(event["choices"] for event in events[:-1]), "C04: a chunk without choices before the last")
        logs = chat(server, "Name a color.", logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]
        check(len(logs) == 12 and all(sum(2.718281828 ** best["logprob"] for best in entry["top_logprobs"]) <= 1.001 and "bytes" in entry
                                      for entry in logs), f"C07: {logs[0]}")
        parts = [{"type": "text", "text": "Name a "}, {"type": "text", "text": "color."}]
        check(abs(chat(server, parts)["usage"]["prompt_tokens"] - usage["prompt_tokens"]) <= 2, "C13: content as parts")
        three = chat(server, "Name a color.", n=3)
        check(len({choice["message"]["content"] for choice in three["choices"]}) == 1 and len(three["choices"]) == 3, f"C15: {three}")
        size = server.get("/slots")[1][0]["n_ctx"]
        status, events, _ = chat_events(server, messages=[{"role": "user", "content": " word" * (size + 10)}])
        check(status == 400 and not events, f"C10: a streamed prompt that is too long: {status}")
        for path, method, status in (("/v1/nothing", "GET", 404), ("/v1/nothing", "POST", 404)):
            found, reply = server.request(method, path, {} if method == "POST" else None)
            check(found == status and "error" in reply, f"C18: {method} {path}: {found} {reply}")
        bodies(server)
        for i in range(6):  # C03: anything may come out, and all of it is JSON
            server.complete("Once", 100, temperature=2.0, seed=i, cache_prompt=False, ignore_eos=True)
        again = chat(server, "Name a color.")
        check(again["usage"]["completion_tokens"] == usage["completion_tokens"], "another answer at the end")
        pages_add_up(server.stats())
        ended(server)


def bodies(server):
    """C03, C12, C16: bodies that are not what they should be; the server lives on and says so in JSON."""
    wrong = [b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"0", b'"a"', b"[[[",
             {"messages": []}, {"messages": {}}, {"messages": "x"}, {"messages": [{"role": "user"}]},
             {"prompt": "a", "n_predict": 2, "logit_bias": {"999999999": 1}}, {"prompt": "a", "n_predict": 2, "top_p": 1.5},
             {"prompt": "a", "n_predict": 2, "temperature": -1}, {"prompt": "a", "n_predict": 2, "n_cmpl": 1000000000}]
    for body in wrong:
        path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/completion"
        status, reply = server.post(path, body)
        check(isinstance(reply, (dict, list)) and (status == 200 or (400 <= status < 600 and "error" in reply)),
              f"C12: {str(body)[:80]}: {status} {str(reply)[:200]}")
    check(server.get("/health")[0] == 200, "the server is not healthy after wrong bodies")
    # Half a body does not keep others from being served.
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as half:
        half.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
        server.complete("Once", 2)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/completion", iter([bytes([byte]) for byte in b'{"prompt": "Once", "n_predict": 2}']),
                       {"Content-Type": "application/json"}, encode_chunked=True)
    reply = connection.getresponse()
    check(reply.status == 200 and json.loads(reply.read())["tokens_predicted"] == 2, f"C16: a body in chunks: {reply.status}")
    connection.close()


def drafted(arguments, what, repeats):
    """Greedy answers with drafts that are checked and rolled back, alone and four at a time."""
    with serve("-np", "4", "-c", "8192", "--cache-ram", "0", *arguments) as server:
        prompts = texts(server, 4, 120)
        if repeats:  # lookup finds its n-grams in the prompt
            prompts = [p[:60] * 3 for p in prompts]
        with serve("-np", "4", "-c", "8192", "--cache-ram", "0") as plain:
            expected = [plain.complete(p, 40, cache_prompt=False)["tokens"] for p in prompts]
            alone = [server.complete(p, 40, cache_prompt=False) for p in prompts]
            found = together([lambda p=p: server.complete(p, 40, cache_prompt=False) for p in prompts])
            n_equal = 0
            for i, prompt in enumerate(prompts):
                n_equal += same_tokens(plain, prompt, expected[i], alone[i]["tokens"], f"{what}, prompt {i} alone")
                n_equal += same_tokens(plain, prompt, expected[i], found[i]["tokens"], f"{what}, prompt {i} with others")
            ended(plain)
        drafts = sum(reply["timings"].get("draft_n", 0) for reply in alone + found)
        accepted = sum(reply["timings"].get("draft_n_accepted", 0) for reply in alone + found)
        print(f"{what}: {n_equal} of 8 answers equal, {accepted} of {drafts} drafted tokens accepted")
        check(drafts > 0, f"{what}: nothing was drafted")
        pages_add_up(server.stats())
        ended(server)


def case_ngram():
    drafted(["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"],
            "n-gram lookup", True)


def case_draft():
    drafted(["--spec-type", "draft-simple", "-md", MODEL, "--spec-draft-n-max", "6"], "draft model", False)


def case_sleep():
    """The model is dropped after some idle seconds, and loaded again by the next request."""
    with serve("-np", "2", "-c", "2048", "--sleep-idle-seconds", "2") as server:
        prompt = texts(server, 1, 100)[0]
        before = server.answer(prompt, 12, cache_prompt=False)
        time.sleep(5)
        check(server.stats()["oscar_up"] == 0, "the server does not sleep")
        same_answers(before, server.answer(prompt, 12, cache_prompt=False), "after a sleep")
        check(server.stats()["oscar_up"] == 1, "the statistics say that a server that woke is down")
        ended(server)


def tiny_pool(server, memory):
    """The slots' sizes in a cache of so much memory, which must be less than was asked for."""
    size = server.get("/slots")[1][0]["n_ctx"]
    check(server.said(f"^oscar: KV cache of 4 sequences.* of up to {size} tokens.*instead of"), f"{size} tokens a slot were not announced")
    stats = server.stats()
    reserved = sum(value for name, value in stats.items() if name.startswith("oscar_reserved_bytes{"))
    check(reserved <= memory, f"{reserved} bytes reserved, allowed {memory}")
    return size


def case_exhausted():
    """A pool for less than the context. With slots of their own each has its share: what outgrows it
    ends at its limit, a fifth client waits, and nobody else notices. With slots that share (-kvu) the
    pool can run out: the server clears idle slots first, then answers with an error; later requests
    are answered right."""
    memory = 46 << 20
    with serve("-np", "4", "-c", "16384", "--kv-memory", str(memory), "--cache-ram", "0") as server:
        size = tiny_pool(server, memory)
        prompts = texts(server, 6, min(size // 3, 150))
        alone = [server.answer(p, 24, cache_prompt=False) for p in prompts]
        long_prompt = texts(server, 1, size - 20, SEED + 3)[0]
        works = [lambda p=p: server.answer(p, 24, cache_prompt=False) for p in prompts]
        works.append(lambda: server.complete(long_prompt, 400, ignore_eos=True, cache_prompt=False))
        found = together(works)
        for i in range(6):
            same_answers(alone[i], found[i], f"request {i} of seven on four slots")
        check(found[6]["stop_type"] == "limit" and found[6]["truncated"], f"a request longer than its share: {found[6]['stop_type']}")
        status, reply = server.post("/completion", {"prompt": long_prompt + long_prompt[:40], "n_predict": 4})
        check(status == 400, f"a prompt longer than its share: {status} {reply}")
        stats = server.stats()
        check(stats['oscar_calls_total{result="no_slot"}'] == 0, "slots with a share of their own ran out of room")
        pages_add_up(stats)
        ended(server)
    with serve("-np", "4", "-kvu", "-c", "16384", "--kv-memory", str(memory)) as server:
        size = tiny_pool(server, memory)
        # Idle slots fill the pool; each new request takes the room of the one that waited longest.
        prompts = texts(server, 6, min(size // 2, 300))
        alone = [server.answer(p, 16) for p in prompts]
        for i in (0, 3, 5, 1):
            same_answers(alone[i], server.answer(prompts[i], 16), f"request {i} after others took its room")
        # More than the pool holds, at once.
        done, refused = [], []

        def run(i):
            status, reply = server.post("/completion", {"prompt": prompts[i], "n_predict": size, "temperature": 0,
                                                        "ignore_eos": True, "cache_prompt": False})
            (done if status == 200 else refused).append((status, str(reply)[:200]))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(len(done) + len(refused) == 4 and refused, f"{len(done)} answers, {len(refused)} refused: {refused}")
        check(all("Context size has been exceeded" in text for _, text in refused), f"refused with {refused}")
        check(server.stats()['oscar_calls_total{result="no_slot"}'] > 0, "the pool did not run out")
        for i in range(4):
            same_answers(alone[i], server.answer(prompts[i], 16, cache_prompt=False), f"request {i} after the pool ran out")
        pages_add_up(server.stats())
        ended(server)


def refused(arguments, pattern):
    try:
        with serve(*arguments) as server:
            raise Failure(f"{arguments}: the server runs")
    except Failure as failure:
        log = os.path.join(WORK, f"server{n_servers}.log")
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.startswith("oscar: ")]
        if "the server runs" in str(failure):
            raise
    check(len(lines) == 1 and re.search(pattern, lines[0]), f"{arguments}: said {lines}, expected {pattern}")


def case_refused():
    """What does not fit is refused before the server listens, in one line."""
    refused(["-np", "4", "-c", "8192", "--kv-memory", "1M"], "kv_memory_bytes is 1048576: expected at least")
    with open("/proc/meminfo", encoding="utf-8") as file:
        total = int(file.readline().split()[1]) * 1024
    tokens = total // 3600 // 256 * 256  # 2.5 bits an element of SmolLM2 are 3600 bytes a token
    refused(["-np", "1", "-c", str(2 * tokens)], "a cache of .* tokens takes .*this machine has")
    refused(["-np", "1", "-c", str(int(tokens * 0.99))], "a cache of .* tokens takes .*(available|this machine has)")
    refused(["--stats", "/nonexistent/folder/file"], "stats_path /nonexistent/folder/file: ")


def main():
    cases = {name[5:]: function for name, function in globals().items() if name.startswith("case_")}
    wanted = sys.argv[6:] or list(cases)
    print(f"seed {SEED}")
    for name in wanted:
        begin = time.monotonic()
        try:
            cases[name]()
        except Failure as failure:
            print(f"{name}: {failure}")
            log = os.path.join(WORK, f"server{n_servers}.log")
            if os.path.exists(log):
                with open(log, encoding="utf-8", errors="replace") as file:
                    print("".join(file.readlines()[-15:]))
            return 1
        print(f"{name}: passed in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
