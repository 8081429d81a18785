# ruff: noqa: SIM905  (a block of words reads better than a list of strings)
"""The words that are single tokens of the shipped tokenizer, grouped by the task that uses them."""

# Keys of look-up documents and items of lists.
NOUNS = """
apple bear bell bird boat bone book bowl bread bridge brush bus cake camel car card castle cat
chair chalk cheese cherry clock cloud coat coin comb cow crab crown cup desk dog door dress drum
duck eagle egg fan farm fern fig fish flag flute fork fox frog gate goat grape hammer hat hill
horse house ink island jar jam key king kite knife ladder lake lamp leaf lemon lion map milk mint
moon mouse nest nut oak onion owl paint pan pear pen piano pig plum pond queen rain ring river
road roof rope rose salt sand seed sheep ship shoe snow soap sock spoon star stone sun swan table
tent tiger tree truck vase wall wheel wolf yarn zebra
""".split()

NAMES = """
Ana Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Nora Omar Paul Rosa Sam Tina Uma
Vera Will Yara Zoe
""".split()

CAPITALS = {
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "France": "Paris",
    "Greece": "Athens",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Spain": "Madrid",
}

# Everything else the prompts and answers are made of.
FUNCTION_WORDS = """
Add Count Good Hello Hi How I JSON Please Reverse Sort The What Write You Your age am and are can
capital city color day for from has help how in is live many me model morning my name number of
old size system the times to up user value with write years you your
""".split()

# Joined punctuation, so that a JSON pair costs few tokens.
PUNCTUATION = ['{"', '"}', '": ', '": "', ', "', '", "', ": ", ", ", "! ", ". "]

PIECES = [*NOUNS, *NAMES, *CAPITALS, *CAPITALS.values(), *FUNCTION_WORDS, *PUNCTUATION]
