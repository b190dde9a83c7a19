"""Runs inside the sandbox: the program from payload.json, then each test in the program's namespace."""

import json
import os


def main() -> None:
    """Run the program; with tests, report which held on the payload's descriptor, signed with its token."""
    with open("payload.json", encoding="utf-8", errors="surrogatepass") as file:
        payload = json.load(file)
    os.unlink("payload.json")
    os.unlink("stdin")
    names: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    process = os.getpid()
    exec(compile(payload["code"], "<completion>", "exec"), names)
    if payload["tests"] is None:
        return
    held = []
    for test in payload["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), names)
            held.append(True)
        except BaseException:  # a test may call sys.exit: that test failed, and the rest still runs
            held.append(False)
    if os.getpid() == process:
        os.write(payload["report"], json.dumps({"token": payload["token"], "held": held}).encode() + b"\n")
    os._exit(0)


main()
