"""Prompts of our own for training drafters: everyday tasks over everyday topics, follow-ups, and German to translate.

`python -m eval.own_prompts [GERMAN.TXT ...] > PROMPTS.JSONL`; German texts are files of passages between lines of
a single %, as the Debian package `fortunes-de` has them (`apt-get download fortunes-de && dpkg -x fortunes-de*.deb .`).
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

TOPICS = """volcanoes; the water cycle; black holes; honey bees; the Roman Empire; jazz music; solar panels; electric cars;
the human heart; chess; coffee; the Great Barrier Reef; vaccines; inflation; public libraries; time management; yoga;
photosynthesis; the Silk Road; gardening in small spaces; dinosaurs; earthquakes; the printing press; recycling; sleep;
learning a new language; the stock market; wind energy; dogs; cats; marathon running; baking bread; the moon; gravity; DNA;
climate change; the French Revolution; remote work; social media; video games; bicycles; trains; bridges; the ocean;
penguins; healthy breakfasts; job interviews; public speaking; saving money; home insurance; computer networks; databases;
machine learning; encryption; open source software; robots; space travel; Mars; the brain; memory; stress; meditation;
friendship; teamwork; leadership; small businesses; online shopping; tea; chocolate; pasta; football; swimming; the piano;
painting; photography; poetry; detective novels; theatre; museums; Japan; Brazil; Egypt; Kenya; Italy; New York City; Paris;
mountains; deserts; rain forests; rivers; islands; thunderstorms; snow; the four seasons; birds; whales; horses; elephants;
trees; mushrooms; antibiotics; nutrition; teeth; glasses; the immune system; elections; human rights; taxes; democracy;
money; trade; farming; forests; fishing; architecture; furniture; clothes; shoes; toys; holidays; weddings; birthdays; camping;
board games; a lost key; an old lighthouse; a clever fox; a robot who wants to paint; a rainy day; a broken clock; a lonely
astronaut; two rival bakers; a talking tree; a night train; a secret garden; a young inventor; a haunted library"""

TASKS = """Explain {t} to a ten-year-old.
What should everyone know about {t}?
Write a short story about {t}.
Write a poem about {t}.
Give me five interesting facts about {t}.
Write a blog post about {t}.
What are the advantages and disadvantages of {t}?
Write an introduction to an essay about {t}.
List ten questions someone might ask about {t}, with short answers.
Describe {t} in three paragraphs.
Why is {t} important? Give reasons.
Write a dialogue between two friends about {t}.
Compose a friendly email to a colleague about {t}.
Create a lesson plan about {t}.
You are an expert. Answer a beginner's question: how do I start to learn about {t}?
Write a speech about {t} for a school event.
Compare what people believed about {t} a hundred years ago with what we know today.
Imagine you are a journalist. Write a news article about {t}.
Suggest a title and an outline for a book about {t}.
Write a product description for a game about {t}.
Act as a tour guide and tell visitors about {t}.
What are common mistakes people make about {t}?
Write a persuasive paragraph about {t}.
Summarize the history of {t}.
Give step-by-step advice concerning {t}.
What would happen if there were no {t}?
Write a multiple-choice quiz with four questions about {t}.
Make a table about {t} with three columns."""

FOLLOW_UPS = """Now make it shorter.
Can you explain that in simpler words?
Rewrite your answer as a list of bullet points.
Give an example for each point.
Rewrite it in a more formal tone.
What is the most important point, and why?
Now write it as a poem.
Continue.
Add one more paragraph.
Translate the first sentence into French.
Are you sure? Check your answer and correct any mistakes.
Write a title for it.
Turn this into a dialogue."""

CODE = """Write a Python function that {c}.
Write a C++ program that {c}.
Write a JavaScript function that {c}.
Explain, with code in Python, how one {c}.
Write a Python class and a small test for code that {c}.
Implement an algorithm in Java that {c} and state its complexity."""

JOBS = """reverses a linked list; counts the words in a text file; finds the largest number in a list; checks whether a word is
a palindrome; computes the n-th Fibonacci number; sorts a list of names; merges two sorted arrays; removes duplicates
from a list; finds all prime numbers below n; converts Celsius to Fahrenheit; parses a CSV file; validates an email
address; finds the shortest path in a graph; computes the median of numbers; counts vowels in a string; rotates a
matrix; finds two numbers that add up to a target; prints a multiplication table; computes a factorial; searches a
sorted array; flattens a nested list; generates a random password; reads a JSON file; computes the greatest common
divisor; checks balanced brackets; groups words by their first letter; finds the longest common prefix; implements a
stack; implements a queue with two stacks; counts the nodes of a binary tree; computes compound interest; draws a
triangle of stars; converts a number to binary; finds the missing number; computes the edit distance of two strings;
draws the frequencies of letters; moves all zeros to the end"""

MATHS = """{n} has {a} apples and buys {b} more each day for {c} days. How many apples does {n} have then?
A train travels {a} miles in {c} hours. How far does it travel in {b} hours at the same speed?
{n} earns ${a} per hour and works {b} hours a week. How much does {n} earn in {c} weeks?
A shop sells pencils for {c} cents each. {n} buys {a} pencils and pays with ${b}. How much change does {n} get?
If x + {a} = {b} * {c}, what is x?
The area of a rectangle is {a} * {b} square metres and its width is {b} metres. What is its perimeter?
{n} reads {b} pages on Monday and {c} times as many on Tuesday. How many pages are left of a book of {a}00 pages?
What is {c}% of {a}0, and what is {b}% of it?
There are {a} red balls, {b} blue balls and {c} green balls in a bag. What is the probability to draw a blue one?
{n} splits {a} sweets among {c} friends and keeps the rest. How many does {n} keep?"""

TRANSLATE = ("Translate German to English: {g}", "Translate to English: {g}", "What does this mean in English? {g}")


def names(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";")]


def german(files: list[str], rng: random.Random) -> list[str]:
    """Single German sentences of 40 to 220 characters, without the line that names who said it."""
    found = set()
    for path in files:
        for passage in Path(path).read_text().split("\n%\n"):
            text = " ".join(re.split(r"\n\s*--|\n\t", passage)[0].split())
            found |= {s for s in re.findall(r"[A-ZÄÖÜ][^.!?]{38,218}[.!?](?= |$)", text) if '"' not in s}
    return rng.sample(sorted(found), len(found))


def prompts(files: list[str], seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    tasks = [task.format(t=topic) for task in TASKS.splitlines() for topic in names(TOPICS)]
    code = [line.format(c=job) for line in CODE.splitlines() for job in names(JOBS)]
    maths = [
        line.format(n=rng.choice(["Anna", "Ben", "Carla", "David", "Mia", "Tom"]), a=rng.randint(11, 90), b=b, c=c)
        for line in MATHS.splitlines()
        for b in range(3, 19)
        for c in rng.sample(range(2, 10), 2)
    ]
    kinds = {
        "writing": rng.sample(tasks, len(tasks)),
        "code": rng.sample(code, len(code)),
        "math": rng.sample(maths, len(maths)),
        "translation": [rng.choice(TRANSLATE[:1] * 4 + TRANSLATE).format(g=g) for g in german(files, rng)],
    }
    rows = []
    for _ in range(700):  # of every ten prompts six write, one codes, one reckons, two translate, while there are any
        for kind in (
            "writing",
            "writing",
            "translation",
            "writing",
            "code",
            "writing",
            "writing",
            "math",
            "translation",
            "writing",
        ):
            if kinds[kind]:
                asked = [kinds[kind].pop()]
                if kind == "writing" and rng.random() < 0.25:
                    asked.append(rng.choice(FOLLOW_UPS.splitlines()))
                rows.append({"kind": kind, "messages": [{"role": "user", "content": text} for text in asked]})
    return rows


if __name__ == "__main__":
    for row in prompts(sys.argv[1:]):
        print(json.dumps(row, ensure_ascii=False))
