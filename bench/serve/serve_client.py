"""A llama-server to start and talk to, with nothing but the standard library.

Used by the tests (tests/serve_cases.py), the soak (soak.py) and the measurements (measure.py).
"""
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request


class Failure(Exception):
    """A check that does not hold; its text says what was found and what was expected."""


def check(condition, text):
    if not condition:
        raise Failure(text)


class Server:
    """A running llama-server. `command` begins with the program; an address is added to it. Many can run
    beside each other: each takes a free port, unless one is given, and runs on `cores` alone."""

    def __init__(self, command, log, environment=None, stats=None, wait_s=300, port=None, cores=None, timeout_s=600):
        self.log, self.stats_path, self.port, self.timeout_s = log, stats, port or free_port(), timeout_s
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None
        with open(log, "wb") as err, open(log + ".out", "wb") as out:
            self.process = subprocess.Popen(
                command + ["--host", "127.0.0.1", "--port", str(self.port)],
                env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None)
        self.wait_ready(wait_s)

    def wait_ready(self, wait_s):
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Failure(f"the server ended with {self.process.returncode}: {self.last_lines()}")
            try:
                if self.get("/health", timeout=5)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise Failure(f"the server was not ready after {wait_s} s")

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.stop()

    def stop(self):
        """Ends it as an operator would; it must end by itself."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise Failure("the server did not end within 60 s of SIGTERM") from None

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def last_lines(self, n=4):
        return " | ".join(self.text().splitlines()[-n:])

    def said(self, pattern):
        return re.search(pattern, self.text(), re.MULTILINE)

    def request(self, method, path, body=None, timeout=600):
        """(status, reply): JSON where it is, text otherwise. Errors of HTTP are replies, too."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode("utf-8", "replace")

    def get(self, path, timeout=600):
        return self.request("GET", path, timeout=timeout)

    def post(self, path, body, timeout=600):
        return self.request("POST", path, body, timeout)

    def tokenize(self, text):
        status, reply = self.post("/tokenize", {"content": text})
        check(status == 200, f"/tokenize: {status} {reply}")
        return reply["tokens"]

    def complete(self, prompt, n_predict=16, **options):
        """The reply of one greedy request; it must succeed."""
        status, reply = self.post("/completion", {
            "prompt": prompt, "n_predict": n_predict, "temperature": 0, "return_tokens": True, **options})
        check(status == 200, f"/completion: {status} {reply}")
        return reply

    def answer(self, prompt, n_predict=16, **options):
        """[(token, {token: log-probability of the best ones})] of one greedy answer."""
        reply = self.complete(prompt, n_predict, n_probs=10, **options)
        return [(entry["id"], {best["id"]: best["logprob"] for best in entry["top_logprobs"]})
                for entry in reply["completion_probabilities"]]

    def slot(self, number, action, filename=""):
        return self.post(f"/slots/{number}?action={action}", {"filename": filename})

    def busy_slots(self):
        status, slots = self.get("/slots")
        check(status == 200, f"/slots: {status} {slots}")
        return sum(slot["is_processing"] for slot in slots)

    def wait_idle(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.busy_slots() == 0:
                return
            time.sleep(0.05)
        raise Failure(f"{self.busy_slots()} slots are still busy after {seconds} s")

    def abandon(self, prompt, after_s, stream=False, n_predict=400, **options):
        """Sends a request and closes the connection after_s later, whatever came."""
        body = json.dumps({"prompt": prompt, "n_predict": n_predict, "temperature": 0, "stream": stream, **options}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(after_s)

    def stream(self, prompt, n_predict, **options):
        """Yields the events of a streamed answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)
        try:
            connection.request("POST", "/completion", json.dumps(
                {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "stream": True, **options}),
                {"Content-Type": "application/json"})
            reply = connection.getresponse()
            check(reply.status == 200, f"/completion: {reply.status} {reply.read() if reply.status != 200 else ''}")
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def stats(self, settle=True):
        """{"name{labels}": number} of the statistics file; labels without context and model."""
        if settle:
            time.sleep(1.3)  # it is written once a second
        values = {}
        with open(self.stats_path, encoding="utf-8") as file:
            for line in file:
                if line.startswith("#"):
                    continue
                name, value = line.rsplit(" ", 1)
                values[re.sub(r'context="\d+",model="[^"]*",?', "", name).replace("{}", "")] = int(value)
        return values

    def memory(self):
        """Resident and peak resident bytes of the process."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", file.read(), re.MULTILINE))
        return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse_cores(text):
    """{0, 1, 2, 5} of "0-2,5", as taskset wants it."""
    cores = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def together(works):
    """Runs the functions at the same time; their results in order. A failure of one is raised."""
    results, failures = [None] * len(works), []
    start = threading.Barrier(len(works))

    def run(i):
        try:
            start.wait()
            results[i] = works[i]()
        except Exception as failure:  # of any kind: it is raised again below
            failures.append((i, failure))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise Failure("; ".join(f"request {i}: {failure!r}" for i, failure in failures))
    return results


def pages_add_up(stats):
    states = {name: value for name, value in stats.items() if name.startswith("oscar_pages{")}
    total = stats["oscar_pages_total"]
    check(states and sum(states.values()) == total, f"pages {states} do not add up to {total}")
    return states


# Nats between two tokens that rounding may settle either way. The cache gives the same bits however a
# batch was cut (tests/test_cache.c), and so do whole answers where ggml's products do not depend on
# the number of rows either (here: Q4_1 with AMX, every answer of these tests equal to the bit); where
# they do, quantised weights make ggml round activations to 8 bits, which enlarges a last bit.
NEAR_TIE = 0.05


def same_tokens(server, prompt, expected, found, what):
    """Compares two greedy answers by tokens. Where they part, the gap between the two tokens is asked
    for alone, printed, and must be a near tie. True when they are equal."""
    n = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
    if n == len(expected) == len(found):
        return True
    check(n < len(expected) and n < len(found), f"{what}: {len(found)} tokens, expected {len(expected)}")
    tokens = prompt if isinstance(prompt, list) else server.tokenize(prompt)
    best = server.answer(tokens + expected[:n], 1, cache_prompt=False)[0][1]
    check(expected[n] in best and found[n] in best, f"{what}: token {n} is {found[n]}, expected {expected[n]}, not among the best")
    gap = abs(best[expected[n]] - best[found[n]])
    print(f"{what}: parts at token {n} of {len(expected)}, the two are {gap:.4f} nats apart", flush=True)
    check(gap <= NEAR_TIE, f"{what}: parts at token {n} where the two are {gap:.4f} nats apart")
    return False


def same_answers(expected, found, what):
    """The same for two results of Server.answer(); returns how far log-probabilities of equal contexts
    moved."""
    moved = 0.0
    for i, ((a, best_a), (b, best_b)) in enumerate(zip(expected, found)):
        if a != b:
            gap = max(abs(best_a[a] - best_a.get(b, -99)), abs(best_b[b] - best_b.get(a, -99)))
            print(f"{what}: parts at token {i} of {len(expected)}, the two are {gap:.4f} nats apart; before it "
                  f"log-probabilities moved by up to {moved:.4f}", flush=True)
            check(gap <= NEAR_TIE, f"{what}: parts at token {i} where the two are {gap:.4f} nats apart")
            return moved
        moved = max([moved] + [abs(best_a[t] - best_b[t]) for t in best_a if t in best_b])
    check(len(expected) == len(found), f"{what}: {len(found)} tokens, expected {len(expected)}")
    return moved


def make_texts(path, n, characters, seed):
    """n different pieces of a text file."""
    with open(path, encoding="utf-8", errors="ignore") as file:
        text = file.read()
    generator = random.Random(seed)
    if len(text) < 2 * characters:
        text = text * (2 * characters // len(text) + 1)
    starts = [generator.randrange(len(text) - characters) for _ in range(n)]
    return [text[start : start + characters] for start in starts]
