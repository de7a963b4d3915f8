"""What all tests with vLLM ask, so that plain vLLM answers each prompt once."""


def prompt(number: int, items: int = 150) -> str:
    """Some 14 tokens an item, that no other number's prompt begins with."""
    facts = " ".join(
        f"Item {i} of list {number} costs {(i * 7 + number) % 97} coins."
        for i in range(items)
    )
    return f"List {number}. {facts} In short, the most important thing is that"


SHARED = [prompt(1), prompt(2, 30)]
LATER = [prompt(3, 30), prompt(4, 30)]
FAULTS = [prompt(number, 20) for number in range(10, 14)]
SHORT = "The capital of France is"
APART = [prompt(20, 30), prompt(21, 10), SHORT]
EVERY = [*SHARED, *LATER, *FAULTS, *APART]
