#!/usr/bin/env python3
"""The table at the end of `make demo`: NAME KL.json MODEL.json LOG-OF-LLAMA-COMPLETION."""

import json
import re
import sys


def speed(log, label):
    """Tokens a second of llama.cpp's "label = ... ms / N tokens (..., X tokens per second)"."""
    found = re.search(rf"(?<!prompt ){label} time =.*?([\d.]+) tokens per second", log)
    if not found:
        sys.exit(f"oscar: error: llama-completion printed no '{label} time' line")
    return float(found.group(1))


def kibibytes(count):
    return f"{count / 1024:.1f} KiB"


def main():
    name, kl_path, model_path, log_path = sys.argv[1:]
    with open(kl_path, encoding="utf-8") as file:
        method = json.load(file)["methods"][0]
    with open(model_path, encoding="utf-8") as file:
        exact_bytes = json.load(file)["fp16_bytes_per_token"]
    with open(log_path, encoding="utf-8", errors="replace") as file:
        log = file.read()
    bits = method["bits"]
    rows = [
        ("cache a token", f"{kibibytes(exact_bytes * bits / 16)}; fp16 takes {kibibytes(exact_bytes)}, "
                          f"{16 / bits:.1f} times as much"),
        ("bits an element", f"{bits:.2f}"),
        ("KL to the exact cache", f"{method['kl']:.4f} nats a token"),
        ("same likeliest token", f"{100 * method['top1']:.1f} %"),
        ("prompt", f"{speed(log, 'prompt eval'):.0f} tokens a second"),
        ("answer", f"{speed(log, 'eval'):.0f} tokens a second"),
    ]
    print(f"{name} on the 2-bit cache")
    for label, value in rows:
        print(f"  {label:<24}{value}")


if __name__ == "__main__":
    main()
