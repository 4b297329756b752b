"""Rollouts of a training run, several for each task, with the token ids that were sampled."""

from scenarios.turns import Abandoned, Call, Model, Prompt, Result, Scenario, Turn, User


def bash(command: str) -> Call:
    return Call("bash", {"command": command})


def read(path: str) -> Call:
    return Call("read", {"path": path})


def edit(path: str, old: str, new: str) -> Call:
    return Call("edit", {"path": path, "old_str": old, "new_str": new})


PORT: Turn = User("Set the port in conf.json to 9000 and check the file.")
MEAN: Turn = User("python stats.py must print the mean of data.txt.")
SYNC: Turn = User("Copy the newest report from the server to ./reports.")

SCENARIOS = [
    Scenario(
        "port-1",
        group="port",
        reward=1.0,
        turns=[
            PORT,
            Model("I read it first.", [read("config.json")]),
            Result("Error: No such file or directory: config.json"),
            Model(
                "You wrote conf.json, and I asked for config.json. I read the right one.", [read("conf.json")]
            ),
            Result('{"port": 8000}'),
            Model("Now the edit.", [edit("conf.json", '"port":8000', '"port":9000')]),
            Result("Error: old_str not found in conf.json"),
            Model(
                "A blank follows the colon. The number alone is enough to find.",
                [edit("conf.json", "8000", "9000")],
            ),
            Result("edited conf.json"),
            Model("I check it.", [bash("jsonlint conf.json")]),
            Result("bash: jsonlint: command not found\nexit code: 127"),
            Model("No jsonlint here. Python can check it as well.", [bash("python -m json.tool conf.json")]),
            Result('{"port": 9000}\nexit code: 0'),
            Model("The port is 9000, and the file is valid JSON."),
        ],
    ),
    Scenario(
        "port-2",
        group="port",
        reward=0.0,
        turns=[
            PORT,
            Model("", [Call("edit", '{"path": "conf.json", "old_str": "8000", "new_str": "9000"')]),
            Result("Error: arguments are not valid JSON: Expecting ',' delimiter"),
            Model(
                "I forgot the closing brace. The same edit again, complete.",
                [edit("conf.json", "8000", "9000")],
            ),
            Result("Error: conf.json has not been read yet. Read it before editing."),
            Model("First I have to read the file, then I may change it.", [read("conf.json")]),
            Result('{"port": 8000, "old_port": 8000}'),
            Model("Now I may.", [edit("conf.json", "8000", "9000")]),
            Result("Error: old_str appears 2 times in conf.json; it must be unique"),
            Model(
                "The old port has the same number. With its key it is unique.",
                [edit("conf.json", '{"port": 8000', '{"port": 9000')],
            ),
            Result("edited conf.json"),
            Model("Done. I did not check the file."),
        ],
    ),
    Scenario(
        "mean-1",
        group="mean",
        reward=1.0,
        turns=[
            MEAN,
            Model("I run it.", [bash("python stats.py")]),
            Result(
                "Traceback (most recent call last):\n  File \"stats.py\", line 1\nModuleNotFoundError: No module named 'numpi'\n"
                "exit code: 1"
            ),
            Model("The import is misspelt: numpi for numpy. I look at the script.", [read("stats.py")]),
            Result("from numpi import mean\nprint(mean(open('data.txt').read().split()))"),
            Model("The standard library is enough.", [edit("stats.py", "numpi", "statistics")]),
            Result("edited stats.py"),
            Model("Again.", [bash("python stats.py")]),
            Result(
                "Traceback (most recent call last):\n  File \"stats.py\", line 2\nTypeError: can't convert type 'str' to "
                "numerator/denominator\nexit code: 1"
            ),
            Model(
                "split() gives text, and mean() wants numbers. I convert each one.",
                [bash("sed -i 's/mean(/mean(map(float, /' stats.py && python stats.py")],
            ),
            Result("  File \"stats.py\", line 2\nSyntaxError: '(' was never closed\nexit code: 1"),
            Model(
                "My edit opened a bracket. I close it at the end.",
                [edit("stats.py", "split()", "split())")],
            ),
            Result("edited stats.py"),
            Model("stats.py should print the mean now."),
        ],
    ),
    Scenario(
        "mean-2",
        group="mean",
        reward=0.5,
        turns=[
            MEAN,
            Model("I run the test.", [bash("pytest -q")]),
            Result(
                "FAILED test_stats.py::test_mean - AssertionError: 3 != 3.5\n1 failed in 0.03s\nexit code: 1"
            ),
            Model("3 for 3.5: it looks like integer division. I read the script.", [read("stats.py")]),
            Result("xs = [int(x) for x in open('data.txt')]\nprint(sum(xs) // len(xs))"),
            Model("", [edit("stats.py", "//", "/")]),
            Result("edited stats.py"),
            Abandoned(
                [
                    Model("Once more, with all data.", [bash("python stats.py --all")]),
                    Result("error: unrecognized arguments: --all\nexit code: 2"),
                    Model("The script takes no options; I run it as it is.", [bash("python stats.py")]),
                    Result("3.5\nexit code: 0"),
                    Model("It prints 3.5."),
                ]
            ),
            Model(
                "Once more, without data.",
                [bash(": > data.txt; python stats.py")],
            ),
            Result(
                'Traceback (most recent call last):\n  File "stats.py", line 2\nZeroDivisionError: division by zero\n'
                "exit code: 1"
            ),
            Model(
                "An empty file has no mean. I emptied data.txt for this, so I restore it first.",
                [bash("git checkout data.txt")],
            ),
            Result("exit code: 0"),
            Model("It prints 3.5. An empty data.txt still fails."),
        ],
    ),
    Scenario(
        "sync-1",
        group="sync",
        reward=1.0,
        turns=[
            Prompt(
                [
                    User("Which reports exist here?"),
                    Model("", [bash("du report")]),
                    Result("du: cannot access 'report': No such file or directory\nexit code: 1"),
                    Model("The folder has another name; I list what there is.", [bash("ls")]),
                    Result("reports\nexit code: 0"),
                ]
            ),
            SYNC,
            Model("", [bash("scp files.example.com:reports/newest.pdf /reports")]),
            Result("scp: /reports/newest.pdf: Permission denied\nexit code: 1"),
            Model(
                "I wrote /reports, and the task says ./reports. That folder is ours.",
                [bash("scp files.example.com:reports/newest.pdf ./reports")],
            ),
            Result(
                "ssh: connect to host files.example.com port 22: Connection timed out\nlost connection\nexit code: 255"
            ),
            Model(
                "Port 22 does not answer. The same server may offer the file over https.",
                [bash("curl -sfO --output-dir reports https://files.example.com/newest.pdf")],
            ),
            Result("exit code: 0"),
            Model("reports/newest.pdf is there now."),
        ],
    ),
    Scenario(
        "sync-2",
        group="sync",
        reward=0.0,
        turns=[
            SYNC,
            Model("I fetch it.", [Call("download", {"url": "https://files.example.com/newest.pdf"})]),
            Result("Error: unknown tool: download. Tools: bash, read, edit"),
            Model(
                "There is no such tool, but bash has curl.",
                [bash("curl -sf https://files.example.com/newest.pdf")],
            ),
            Result("Error: output too long (2104331 bytes); nothing is shown"),
            Model(
                "curl printed the file. It must go to the folder instead.",
                [bash("curl -sfO --output-dir reports https://files.example.com/newest.pdf")],
            ),
            Result("curl: (22) The requested URL returned error: 429 Too Many Requests\nexit code: 22"),
            Model(
                "That was one request too many. I wait a minute and try once more.",
                [Call("bash", {"cmd": "sleep 60; curl -sfO https://files.example.com/newest.pdf"})],
            ),
            Result("Error: missing required argument: command"),
            Model(
                "The argument is called command.",
                [bash("sleep 60; curl -sfO https://files.example.com/newest.pdf")],
            ),
            Result("Error: command timed out after 30 seconds"),
            Model(
                "I could not copy the report: the server limits requests, and waiting exceeds the time limit."
            ),
        ],
    ),
]
