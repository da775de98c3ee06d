"""Files that can be read, with rows that cannot be used."""

from training.malformed.case import ANSWERED, ASKED, GOOD, Case, chat, line, rows

from leantune.training.data.shapes import ACCEPTED

ROWS = [
    Case(
        "mixed shapes",
        {"d.jsonl": GOOD + chat(ASKED, ANSWERED) + line({"text": "a"})},
        rows(
            2,
            3,
            (
                "{d}/d.jsonl, line 2: it has the shape messages, and other rows have the shape prompt; keep "
                "rows of one shape in a file; several files can be named as a list"
            ),
            (
                "{d}/d.jsonl, line 3: it has the shape text, and other rows have the shape prompt; keep rows "
                "of one shape in a file; several files can be named as a list"
            ),
        ),
    ),
    Case(
        "unknown columns in one row",
        {"d.jsonl": GOOD + line({"promt": "a", "completion": "b"})},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: it has the columns 'promt', 'completion', which are no shape known here, "
                "and other rows have the shape prompt; keep rows of one shape in a file; several files can be "
                "named as a list"
            ),
        ),
    ),
    Case(
        "unknown columns",
        {"d.jsonl": line({"title": "a", "body": "b"})},
        ("- dataset: {d}/d.jsonl: the rows have the columns 'title', 'body', which are no shape known here.\n")
        + ACCEPTED,
    ),
    Case(
        "rows without columns",
        {"d.jsonl": GOOD + "{}\n"},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: it has no columns, which is no shape known here, and other rows have the "
                "shape prompt; keep rows of one shape in a file; several files can be named as a list"
            ),
        ),
    ),
    Case(
        "a wrong role",
        {"d.jsonl": chat(ASKED, {"role": "narrator", "content": "Once."})},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: messages[1].role: it has the role 'narrator'; known: human, user, gpt, "
                "assistant, model, system"
            ),
        ),
    ),
    Case(
        "a role that is no text",
        {"d.jsonl": chat({"role": ["user"], "content": "a"}, ANSWERED)},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: messages[0].role: it has the role ['user']; known: human, user, gpt, "
                "assistant, model, system"
            ),
        ),
    ),
    Case(
        "a turn without a role",
        {"d.jsonl": chat({"content": "a"}, ANSWERED)},
        rows(
            1,
            1,
            (
                '{d}/d.jsonl, line 1: messages[0]: it lacks a role; write {"role": "user", "content": "..."}, '
                "or from and value"
            ),
        ),
    ),
    Case(
        "no turns",
        {"d.jsonl": chat()},
        rows(1, 1, "{d}/d.jsonl, line 1: messages: it has no turns; fill it in, or leave the row out"),
    ),
    Case(
        "turns in a csv cell",
        {"d.csv": 'messages\n"[{""role"": ""user""}]"\n'},
        rows(
            1,
            1,
            (
                "{d}/d.csv, line 2: messages: it is text where a list of turns belongs; a csv cell holds no "
                "turns: write jsonl"
            ),
        ),
    ),
    Case(
        "no assistant turn",
        {"d.jsonl": chat(ASKED)},
        rows(
            1, 1, ("{d}/d.jsonl, line 1: it has no assistant turn to learn from; add the answer, or leave the row out")
        ),
    ),
    Case(
        "an empty answer",
        {"d.jsonl": chat(ASKED, ANSWERED) + chat(ASKED, {"role": "assistant", "content": " \n"})},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: messages[1].content: a turn of assistant is empty; fill it in, or leave "
                "the row out"
            ),
        ),
    ),
    Case(
        "parts in place of text",
        {"d.jsonl": chat(ASKED, {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]})},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: messages[1].content: a turn of assistant is [{'type': 'text', 'text': "
                "'Blue.'}], not text; give its parts as one text"
            ),
        ),
    ),
    Case(
        "a NaN answer",
        {"d.jsonl": '{"prompt": "a", "completion": NaN}\n'},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: completion: it is NaN, a value that was missing when the file was "
                "written; fill it in, or leave the row out"
            ),
        ),
    ),
    Case(
        "a null question",
        {"d.jsonl": line({"question": None, "answer": "b"})},
        rows(1, 1, "{d}/d.jsonl, line 1: question: it is empty; fill it in, or leave the row out"),
    ),
    Case(
        "text and turns",
        {"d.jsonl": line({"prompt": "a", "completion": [ANSWERED]})},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: one of prompt and completion is a list; write both as text, or both as "
                "lists of messages"
            ),
        ),
    ),
    Case(
        "a completion that begins with the user",
        {"d.jsonl": line({"prompt": [ASKED], "completion": [ASKED, ANSWERED]})},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: completion: it does not begin with an assistant turn; put what comes "
                "before into prompt"
            ),
        ),
    ),
    Case(
        "two BOS",
        {"d.jsonl": line({"text": "<|endoftext|><|endoftext|>a"})},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: it begins with two BOS tokens; leave <|endoftext|> out of the text: the "
                "tokenizer or its template writes one"
            ),
        ),
        {"bos": "<|endoftext|>"},
    ),
    Case(
        "an id beyond the embedding",
        {"d.jsonl": line({"text": "a"}) + line({"text": "a<|extra|>"})},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: token id 320 ('<|extra|>') is beyond the model's 320 embeddings; give "
                "the model its own tokenizer, or enlarge it with resize_token_embeddings and save both"
            ),
        ),
        {"extra": "<|extra|>"},
    ),
    Case(
        "nothing left within max_length",
        {"d.jsonl": GOOD + line({"prompt": "x" * 40, "completion": "y"})},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: nothing is left to learn within max_length 16; its answer begins after "
                "40 tokens: raise max_length, or shorten its prompt"
            ),
        ),
        {"max_length": 16},
    ),
    Case(
        "one row and a share to hold out",
        {"d.jsonl": GOOD},
        "- eval_split: 0.5 of 1 rows is 0; both parts need a row",
        {"eval_split": 0.5},
    ),
    Case(
        "rows that are also held out",
        {"d.jsonl": GOOD + line({"prompt": "3+3?\n", "completion": "6"}), "held.jsonl": GOOD},
        rows(
            1, 2, ("{d}/d.jsonl, line 1: it is also held out ({d}/held.jsonl, line 1); take it out of one of the two")
        ),
        {"eval_dataset": "{d}/held.jsonl"},
    ),
]
