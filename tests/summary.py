"""Counts what a test run wrote into a folder; the last line is "N passed, N failed". Exits with 1 when something failed or nothing ran."""
import glob
import json
import os
import sys
import xml.etree.ElementTree as ElementTree


def counts_of(path):
    """(passed, failed) of one program's JSON: GoogleTest's, or {"passed", "failed"} of the node tests."""
    with open(path, encoding="utf-8") as file:
        result = json.load(file)
    if "passed" in result:
        return result["passed"], result["failed"]
    failed = result["failures"] + result.get("errors", 0)
    skipped = sum(case.get("result") == "SKIPPED" for suite in result["testsuites"] for case in suite["testsuite"])
    return result["tests"] - result.get("disabled", 0) - failed - skipped, failed


def main(folder):
    passed = failed = 0
    for case in ElementTree.parse(os.path.join(folder, "ctest.xml")).getroot().iter("testcase"):
        name, status = case.get("name"), case.get("status")
        own = [p for p in (f"{folder}/{name}_tests.json", f"{folder}/{name}.json") if os.path.exists(p)]
        if status == "notrun":
            print(f"{name}: skipped")
            continue
        good, bad = counts_of(own[0]) if own else (0, 0)
        if not own:
            good, bad = (1, 0) if status == "run" else (0, 1)
        elif status == "fail" and bad == 0:
            bad = 1  # the program did not come to its end
        print(f"{name}: {good} passed, {bad} failed")
        passed, failed = passed + good, failed + bad
    fuzz = os.path.join(folder, "fuzz.txt")
    if os.path.exists(fuzz):
        with open(fuzz, encoding="utf-8") as file:
            good = file.read().strip() == "passed"
        print("fuzz: " + ("passed" if good else "failed"))
        passed, failed = passed + good, failed + (not good)
    for path in sorted(glob.glob(f"{folder}/*.txt")):
        if not path.endswith("fuzz.txt"):
            with open(path, encoding="utf-8") as file:
                print(file.read().strip())
    print(f"{passed} passed, {failed} failed")
    sys.exit(0 if passed and not failed else 1)


if __name__ == "__main__":
    main(sys.argv[1])
