"""Rollouts of an agent behind a chat API, several for each task. Only the text tells of an error."""

from scenarios.turns import Call, Model, Result, Scenario, Turn, User


def bash(command: str) -> Call:
    return Call("bash", {"command": command})


def read(path: str) -> Call:
    return Call("read_file", {"path": path})


def edit(path: str, old: str, new: str) -> Call:
    return Call("edit_file", {"path": path, "old_str": old, "new_str": new})


SLUG: Turn = User("slugify('Top 10') should give top-10 and gives top-. Fix text.py.")
ORDERS: Turn = User("Count the orders of each country in orders.csv and write counts.json.")
RATES: Turn = User("Write today's euro rates to rates.json with fetch.py.")
RELEASE: Turn = User("Bring the branch release up to date with main. The tests must pass.")

SCENARIOS = [
    Scenario(
        "slug-1",
        group="slug",
        reward=1.0,
        turns=[
            SLUG,
            Model("I run its test first.", [bash("pytest -q test_text.py")]),
            Result(
                "F\n=== FAILURES ===\n>   assert slugify('Top 10') == 'top-10'\nE   AssertionError: assert 'top-' == 'top-10'\n"
                "FAILED test_text.py::test_digits - AssertionError\n1 failed in 0.02s\n[exit code: 1]"
            ),
            Model(
                "The digits vanish, so the pattern of what is kept must lack them. I read it.",
                [read("text.py")],
            ),
            Result(
                "KEEP = re.compile(r'[^a-z-]')\n\ndef slugify(s):\n    return KEEP.sub('', s.lower().replace(' ', '-'))"
            ),
            Model(
                "The class needs 0-9.", [edit("text.py", "re.compile('[^a-z-]')", "re.compile('[^a-z0-9-]')")]
            ),
            Result("Error: old_str not found in text.py. No change was made."),
            Model(
                "The file has an r before the quote. The class alone is enough to find it.",
                [edit("text.py", "[^a-z-]", "[^a-z0-9-]")],
            ),
            Result("Edited text.py."),
            Model(calls=[bash("pytest -q test_text.py")]),
            Result("1 passed in 0.01s\n[exit code: 0]"),
            Model("slugify keeps digits now; its test passes."),
        ],
    ),
    Scenario(
        "slug-2",
        group="slug",
        reward=0.0,
        turns=[
            SLUG,
            Model(calls=[read("src/text.py")]),
            Result("Error: [Errno 2] No such file or directory: 'src/text.py'"),
            Model(
                "You wrote text.py, without src in front. I read it where you said it is.",
                [read("text.py")],
            ),
            Result(
                "KEEP = re.compile(r'[^a-z-]')\n\ndef slugify(s):\n    return KEEP.sub('', s.lower().replace(' ', '-'))"
            ),
            Model(
                "I put the digits in.",
                [Call("replace_in_file", {"path": "text.py", "old_str": "a-z", "new_str": "a-z0-9"})],
            ),
            Result("Error: unknown tool 'replace_in_file'. Available tools: bash, read_file, edit_file"),
            Model(
                "The tool for this is edit_file, with the same three arguments.",
                [edit("text.py", "a-z", "a-z0-9")],
            ),
            Result("Edited text.py."),
            Model("Digits are kept now. I did not run the test."),
        ],
    ),
    Scenario(
        "slug-3",
        group="slug",
        reward=0.5,
        turns=[
            SLUG,
            Model(
                calls=[Call("edit_file", '{"path": "text.py", "old_str": "[^a-z-]", "new_str": "[^a-z0-9-]"')]
            ),
            Result(
                "Error: the arguments are not valid JSON: Expecting ',' delimiter: line 1 column 66 (char 65)"
            ),
            Model(
                "The closing brace was missing. I send the same edit again, complete this time.",
                [edit("text.py", "[^a-z-]", "[^a-z0-9-]")],
            ),
            Result("Edited text.py."),
            Model(calls=[bash("python -m pytset -q")]),
            Result("/usr/bin/python: No module named pytset\n[exit code: 1]"),
            Model("The module is called pytest; I mistyped it.", [bash("python -m pytest -q")]),
            Result("1 passed in 0.01s\n[exit code: 0]"),
            Model("Fixed and tested."),
        ],
    ),
    Scenario(
        "orders-1",
        group="orders",
        reward=1.0,
        turns=[
            ORDERS,
            Model(
                calls=[
                    bash(
                        "python -c \"import csv; print([r['country'] for r in csv.DictReader(open('orders.csv'))][:3])\""
                    )
                ]
            ),
            Result(
                'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
                "KeyError: 'country'\n[exit code: 1]"
            ),
            Model(
                "There is no column of that name. The first line of the file says what it is called.",
                [bash("head -n 2 orders.csv")],
                thinking="A KeyError on the first row: the header differs.",
            ),
            Result("id;land;total\n1;DE;20\n[exit code: 0]"),
            Model(
                "It is `land`, and the separator is a semicolon.",
                [bash("cut -d';' -f2 orders.csv | tail -n +2 | sort | uniq -c | jsonify > counts.json")],
            ),
            Result("bash: jsonify: command not found\n[exit code: 127]"),
            Model(
                "There is no jsonify. pandas writes JSON in one step.",
                [
                    bash(
                        'python -c "import pandas as p; '
                        "p.read_csv('orders.csv', sep=';').land.value_counts().to_json('counts.json')\""
                    )
                ],
            ),
            Result("[exit code: 0]"),
            Model("counts.json holds the number of orders of each country."),
        ],
    ),
    Scenario(
        "orders-2",
        group="orders",
        reward=0.0,
        turns=[
            ORDERS,
            Model(calls=[Call("read_file", {"file": "orders.csv"})]),
            Result("Error: read_file() got an unexpected keyword argument 'file'; required: path"),
            Model("The argument is named path. I read the file with that.", [read("orders.csv")]),
            Result("Error: output too long: 1842230 characters, the limit is 20000. Nothing is shown."),
            Model(
                "The file is far too big to read whole; its first lines show the columns.",
                [bash("head -n 2 orders.csv")],
            ),
            Result("id;land;total\n1;DE;20\n[exit code: 0]"),
            Model(calls=[bash("cut -d';' -f2 orders.csv | sort | uniq -c > /data/counts.json")]),
            Result("bash: /data/counts.json: Permission denied\n[exit code: 1]"),
            Model(
                "I may not write to /data, and the task did not ask for it. The file belongs here.",
                [bash("cut -d';' -f2 orders.csv | sort | uniq -c > counts.json")],
            ),
            Result("[exit code: 0]"),
            Model("counts.json is written, though as plain lines."),
        ],
    ),
    Scenario(
        "rates-1",
        group="rates",
        reward=1.0,
        turns=[
            RATES,
            Model(calls=[bash("python fetch.py > rates.json")]),
            Result(
                "requests.exceptions.ConnectionError: Failed to establish a new connection: [Errno 111] Connection refused\n"
                "[exit code: 1]"
            ),
            Model(
                "Nothing listens at that address. Before I try again I look at which one fetch.py uses.",
                [bash("grep -n http fetch.py")],
            ),
            Result(
                "3:URL = 'http://localhost:8080/rates'\n4:# was https://rates.example.com/v1\n[exit code: 0]"
            ),
            Model(
                "It is a test address.",
                [bash("URL=https://rates.example.com/v1 python fetch.py > rates.json")],
            ),
            Result("HTTP 429 Too Many Requests: rate limit exceeded, retry after 30 s\n[exit code: 1]"),
            Model(
                "The address is right; I only asked too soon. I wait the 30 seconds that it names.",
                [bash("sleep 30; URL=https://rates.example.com/v1 python fetch.py > rates.json")],
            ),
            Result("[exit code: 0]"),
            Model("rates.json holds today's rates. fetch.py itself still has the test address."),
        ],
    ),
    Scenario(
        "rates-2",
        group="rates",
        reward=0.0,
        turns=[
            RATES,
            Model(calls=[bash("python fetch.py")]),
            Result("Error: command timed out after 60 seconds"),
            Model(
                "It hangs, so I read what it waits for before I start it again.",
                [read("fetch.py")],
            ),
            Result(
                "import requests\n# No time limit: raises no TimeoutError\nprint(requests.get(URL).json()['eur'] + 1)"
            ),
            Model(calls=[bash("timeout 20 python fetch.py --once")]),
            Result(
                'Traceback (most recent call last):\n  File "fetch.py", line 3, in <module>\n'
                'TypeError: can only concatenate str (not "int") to str\n[exit code: 1]'
            ),
            Model(
                "The service sends the rate as text, so it needs float() before anything is added.",
                [edit("fetch.py", "['eur'] + 1", "['eur']")],
            ),
            Result("Edited fetch.py."),
            Model("fetch.py prints the rate as it comes. I wrote no rates.json."),
        ],
    ),
    Scenario(
        "release-1",
        group="release",
        reward=1.0,
        turns=[
            RELEASE,
            Model(calls=[bash("git merge main")]),
            Result(
                "CONFLICT (content): Merge conflict in api.py\nAutomatic merge failed; fix conflicts\n[exit code: 1]"
            ),
            Model("api.py conflicts. I look at the lines of both sides.", [bash("git diff api.py")]),
            Result("++<<<<<<< HEAD\n +LIMIT = 10\n++=======\n+ LIMIT = 20\n++>>>>>>> main\n[exit code: 0]"),
            Model("main is newer.", [edit("api.py", "LIMIT", "LIMIT = 20")]),
            Result("Error: old_str appears 2 times in api.py; it must appear once. No change was made."),
            Model(
                "Both sides have the word. Taking the whole file from main settles the conflict in one step.",
                [bash("git checkout --theirs api.py && git add api.py && pytest -q")],
            ),
            Result("12 passed in 0.4s\n[exit code: 0]"),
            Model(calls=[bash("git commit -q --no-edit")]),
            Result("[exit code: 0]"),
            Model("release has all of main; the limit is 20, and all tests pass."),
        ],
    ),
    Scenario(
        "release-2",
        group="release",
        reward=0.0,
        turns=[
            RELEASE,
            Model(calls=[bash("git push origin main:release")]),
            Result("error: failed to push some refs to 'origin'\n[exit code: 1]"),
            Model(
                "The push is refused because release has commits of its own. They must be merged, not replaced.",
                [bash("git merge -X theirs main")],
            ),
            Result("Merge made by the 'ort' strategy.\n[exit code: 0]"),
            Model(calls=[edit("api.py", "LIMIT = 20", "LIMIT := 20")]),
            Result("Error: you must read the file api.py before you edit it."),
            Model("I read the file first, as the tool asks me to.", [read("api.py")]),
            Result("LIMIT = 20\n"),
            Model(calls=[bash("sed -i 's/=/:=/' api.py && python api.py")]),
            Result(
                '  File "api.py", line 1\n    LIMIT := 20\n          ^^\nSyntaxError: invalid syntax\n[exit code: 1]'
            ),
            Model(
                "`:=` is no statement. The line was right before, so I put it back as it was.",
                [bash("git checkout api.py")],
            ),
            Result("Updated 1 path from the index\n[exit code: 0]"),
            Model("release is merged. I did not run the tests."),
        ],
    ),
    Scenario(
        "question-1",
        turns=[
            User(
                "My log says: Traceback (most recent call last): ValueError: bad port. Where is the port read?"
            ),
            Model(calls=[bash("grep -n port serve.py")]),
            Result("4:    raise ValueError('bad port')\n7:port = int(os.environ['PORT'])\n[exit code: 0]"),
            Model("In line 7 of serve.py, from the variable PORT; line 4 raises what your log shows."),
            User("What is it on this machine?"),
            Model(calls=[bash("printenv PORT")]),
            Result("The user declined this command."),
            Model("Then I do not look. You can see it with printenv PORT in the shell that starts serve.py."),
            User("It shows nothing there. You may try it once."),
            Model(calls=[bash("printenv PORT")]),
            Result("[exit code: 1]"),
        ],
    ),
]
