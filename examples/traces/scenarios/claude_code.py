"""Sessions of a coding agent in a terminal. Its results carry an error flag."""

from scenarios.turns import Abandoned, Call, Model, Note, Result, Scenario, User

REJECTED = "The user doesn't want to proceed with this tool use. The tool use was rejected. STOP and wait for the user."
INTERRUPTED = "[Request interrupted by user for tool use]"


def bash(command: str) -> Call:
    return Call("Bash", {"command": command})


def read(path: str) -> Call:
    return Call("Read", {"file_path": path})


def grep(pattern: str, path: str) -> Call:
    return Call("Grep", {"pattern": pattern, "path": path})


def edit(path: str, old: str, new: str) -> Call:
    return Call("Edit", {"file_path": path, "old_string": old, "new_string": new})


def failed(text: str) -> Result:
    return Result(text, error=True)


def refused(text: str) -> Result:
    """What the agent's own tools answer when a call cannot run."""
    return Result(f"<tool_use_error>{text}</tool_use_error>", error=True)


BILLS = Scenario(
    "bills",
    title="Due dates are one day late",
    turns=[
        Note("meta", "Caveat: a local command wrote the message below."),
        User("tests/test_due.py fails. Please fix the cause."),
        Model(calls=[bash("pytest -q tests/test_due.py")], thinking="See it fail first."),
        failed(
            "Exit code 1\n>   assert due(FIRST, 14).day == 15\nE   AssertionError: assert 16 == 15\n1 failed in 0.04s"
        ),
        Model(
            "The date is one day late, so `due` seems to count the first day too. Let me read it.",
            [read("/srv/bills/due.py")],
        ),
        refused("File does not exist."),
        Model(
            "There is no due.py here. I search for the function instead of guessing.",
            [grep("def due", "/srv/bills")],
            thinking="A guess cost one call. The name of the function is certain.",
        ),
        Result("cal.py:12:def due(start, days):"),
        Model(calls=[read("/srv/bills/cal.py")]),
        Result("    13\t    return start + timedelta(days=days + 1)"),
        Model("`days + 1` is the mistake.", [edit("/srv/bills/cal.py", "delta(days + 1)", "delta(days)")]),
        refused("String to replace not found in file.\nString: delta(days + 1)"),
        Model(
            "My old text lacks `days=`. By its number the line cannot be missed.",
            [bash("sed -i '13s/ + 1//' cal.py && pytest -q tests/test_due.py")],
        ),
        Result("1 passed in 0.03s"),
        Model("Fixed: `due` added one day too many. The test passes."),
    ],
)

RENAME = Scenario(
    "rename",
    turns=[
        Abandoned(
            [
                User("Rename timeout everywhere."),
                Model("I look for the name first.", [bash("grep -rn timeout --includes=*.py .")]),
                failed("Exit code 2\ngrep: unrecognized option '--includes=*.py'"),
                Model(
                    "The option is called --include, without an s at its end.", [bash("grep -rn timeout .")]
                ),
                Result("config.py:4:timeout = 30\nclient.py:9:timeout=config.timeout"),
            ]
        ),
        User("Rename the setting timeout in config.py to limit. Nothing else."),
        Model("One line changes.", [edit("/srv/poll/config.py", "timeout", "limit")]),
        refused("File has not been read yet. Read it first before writing to it."),
        Model(
            "I have to read it before I may change it.",
            [read("/srv/poll/config.py")],
        ),
        Result("     3\t# The client's own timeout is longer.\n     4\ttimeout = 30"),
        Model(calls=[edit("/srv/poll/config.py", "timeout", "limit")]),
        refused("Found 2 matches of the string to replace, but replace_all is false. Give more context."),
        Model(
            "Line 3 has the word too; with its value it is unique.",
            [edit("/srv/poll/config.py", "timeout = 30", "limit = 30")],
        ),
        Result("The file /srv/poll/config.py has been updated."),
        Model("Now I check who reads it.", [Call("Grep", {"path": "/srv/poll"})]),
        refused(
            "InputValidationError: Grep failed due to the following issue:\nThe required parameter `pattern` is missing"
        ),
        Model(
            "I left the pattern out. I search again, for the old name.",
            [grep(r"config\.timeout", "/srv/poll")],
        ),
        Result("client.py:9:timeout=config.timeout"),
        Model("Renamed. client.py line 9 still has the old name."),
    ],
)

DEPLOY = Scenario(
    "deploy",
    turns=[
        User("Put version 1.4.2 on staging."),
        Model("I'll deploy it.", [Call("Deploy", {"target": "staging", "version": "1.4.2"})]),
        refused("Error: No such tool available: Deploy"),
        Model(
            "I have no tool for that. There may be a script; I look in bin.",
            [bash("ls -l bin")],
        ),
        Result("-rw-r--r-- 1 app app 412 release.sh"),
        Model(calls=[bash("./bin/release.sh staging 1.4.2")]),
        failed("Exit code 126\n/bin/bash: line 1: ./bin/release.sh: Permission denied"),
        Model(
            "The script has no execute bit. I hand it to bash, which needs none.",
            [bash("bash bin/release.sh staging 1.4.2")],
        ),
        failed("Exit code 127\nbin/release.sh: line 9: rsink: command not found"),
        Model(
            "Line 9 calls `rsink`, most likely a slip for rsync. First I check that rsync is installed.",
            [bash("command -v rsync")],
        ),
        Result("/usr/bin/rsync"),
        Model("I correct the name.", [edit("/srv/site/bin/release.sh", "rsink", "rsync")]),
        failed(REJECTED),
        User(INTERRUPTED),
        User("Leave it alone. What is wrong in it?"),
        Model("Line 9 of bin/release.sh says rsink and means rsync. I changed nothing."),
    ],
)

SIGTERM = Scenario(
    "sigterm",
    turns=[
        User("Does the worker finish its job on SIGTERM? Only answer, change nothing."),
        Model(
            "I read both files that could say so.",
            [read("/srv/worker/signals.py"), read("/srv/worker/worker.py")],
        ),
        refused("File does not exist."),
        Result("     1\tfrom runtime import on_term\n     2\timport redis"),
        Model(
            "`on_term` comes from runtime.",
            [bash("python worker.py"), bash("grep on_term *.py")],
        ),
        failed(
            "Exit code 1\nTraceback (most recent call last):\n"
            '  File "/srv/worker/worker.py", line 2, in <module>\n    import redis\n'
            "ModuleNotFoundError: No module named 'redis'"
        ),
        Result("runtime.py:def on_term(job):"),
        Model(
            "redis is missing here. The project lists it, so I install what requirements.txt asks for.",
            [bash("pip install -r requirements.txt")],
        ),
        failed(
            "Exit code 1\nWARNING: Retrying: Failed to establish a new connection: [Errno -3] Temporary failure in "
            "name resolution\nERROR: No matching distribution found for redis"
        ),
        Model(
            "There is no network, so the worker cannot run here. The source is enough: I read the handler.",
            [read("/srv/worker/runtime.py")],
        ),
        Result("     8\tdef on_term(job):\n     9\t    job.wait()\n    10\t    sys.exit(0)"),
        Model(
            "Yes: on_term waits for the job and only then exits. I read this in the source and did not run it."
        ),
    ],
)

SLOW = Scenario(
    "slow",
    turns=[
        User("Which endpoints are slow? Let an agent go through the logs."),
        Model(
            "I give that to an agent.",
            [
                Call(
                    "Task",
                    {
                        "description": "Find slow endpoints",
                        "prompt": "Name the endpoints above one second in /srv/api/log/api.log.",
                        "subagent_type": "general-purpose",
                    },
                )
            ],
        ),
        Result(
            "Two are slow: /export takes 4.1 s and /search 2.3 s.",
            side_chain=[
                User("Name the endpoints above one second in /srv/api/log/api.log."),
                Model("I read the log.", [read("/srv/api/log/api.log")]),
                failed(
                    "File content (31204 tokens) exceeds maximum allowed tokens (25000). Please use offset and limit "
                    "parameters to read specific portions of the file, or search for specific content."
                ),
                Model(
                    "The log is too long to be read whole. I only want slow requests, so I filter by duration.",
                    [bash("grep -rhE 'ms=[0-9]{4}' /srv/api")],
                ),
                failed("Command timed out after 2m 0.0s"),
                Model(
                    "I searched all of /srv/api, backups included. The question is about one file.",
                    [bash("grep -E 'ms=[0-9]{4}' /srv/api/log/api.log")],
                ),
                Result("path=/export ms=4100\npath=/search ms=2300"),
                Model("Two are slow: /export takes 4.1 s and /search 2.3 s."),
            ],
        ),
        Model("/export (4.1 s) and /search (2.3 s) are above one second. Nothing else is."),
    ],
)

CHART = Scenario(
    "chart",
    title="A gap in the latency chart",
    turns=[
        User("out/latency.png has a gap at noon. Why?"),
        Model(
            "I look at the chart.", [read("/srv/charts/out/latency.png")], thinking="The picture says where."
        ),
        Result(image=True),
        Model("The gap is there. The log of the plot may explain it.", [bash("tail -n 3 out/plot.log")]),
        Result("Traceback (most recent call last):\nConnectionError: no samples\nretried, 2 samples written"),
        Note("queued", "It is the eu region, by the way."),
        Model(
            "That error was caught and retried. I fetch the samples of eu.",
            [Call("WebFetch", {"url": "https://metrics.example.com/eu", "prompt": "samples"})],
        ),
        refused("Request failed with status code 429: Too Many Requests. Retry after 20 seconds."),
        Model(
            "The service limits how often one may ask. I wait as long as it says and ask again.",
            [bash("sleep 20; curl -s 'https://metrics.example.com/eu'")],
        ),
        Result('{"samples": [[11, 80], [13, 82]]}'),
        Model("Noon has no sample.", [Call("mcp__store__probe", {"region": "eu", "hour": 12})]),
        failed("shard eu-3 is draining"),
        Model(
            "The shard is being emptied. Its history may say since when, which is what we need.",
            [Call("mcp__store__history", {"shard": "eu-3"})],
        ),
        Result("eu-3: draining since 11:58"),
        Model(
            "The shard eu-3 has been draining since 11:58, so no sample of noon was stored. The plot is right."
        ),
    ],
)

MERGE = Scenario(
    "merge",
    turns=[
        Note("command", "<local-command-stdout>Set model to example-model</local-command-stdout>"),
        User("Merge feature/miles and make sure that units.py runs."),
        Model(calls=[bash("git merge feature/miles")]),
        failed(
            "Exit code 1\nAuto-merging units.py\nCONFLICT (content): Merge conflict in units.py\n"
            "Automatic merge failed; fix conflicts and then commit the result."
        ),
        Model(
            "units.py is in conflict. I look at both sides before I choose one.",
            [bash("git diff units.py")],
        ),
        Result("++<<<<<<< HEAD\n +MILE = 1.6\n++=======\n+ MILE = 1.609344\n++>>>>>>> feature/miles"),
        Model("The branch has the exact number.", [bash("sed -i 1,3d units.py && python units.py 3")]),
        failed(
            'Exit code 1\n  File "units.py", line 2\n    >>>>>>> feature/miles\n    ^^\nSyntaxError: invalid syntax'
        ),
        Model(
            "I left the closing marker of the conflict in line 2. It goes too.",
            [bash("sed -i 2d units.py && python units.py 3")],
        ),
        failed(
            'Exit code 1\nTraceback (most recent call last):\n  File "units.py", line 4, in <module>\n'
            "    print(sys.argv[1] * MILE)\nTypeError: can't multiply sequence by non-int of type 'float'"
        ),
        Model(
            "The argument is text; it has to become a number first.",
            [bash("sed -i 's/sys.argv.1./float(&)/' units.py && python units.py 3 && git commit -qam merge")],
        ),
        Result("4.828032"),
        Model("Merged, with the exact mile, and units.py runs."),
    ],
)

BUILD = Scenario(
    "build",
    turns=[
        User('Is the build green? Yesterday it said "make: *** [check] Error 2".'),
        Model(calls=[bash("make -s check")]),
        failed("Exit code 2\nmake: *** [Makefile:14: check] Error 2"),
        Model(
            "make says only that a step failed. I look up what line 14 runs and call it by itself.",
            [bash("sed -n 14p Makefile")],
        ),
        Result("\tnode tools/links.js docs"),
        Model(calls=[bash("node tools/links.js docs")]),
        failed("Exit code 1\ndocs/install.md: 3 broken links"),
    ],
)

SCENARIOS = [BILLS, RENAME, DEPLOY, SIGTERM, SLOW, CHART, MERGE, BUILD]
