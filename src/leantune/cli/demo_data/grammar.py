"""The words and sentence frames the demo's rows are written from.

Every list comes in two parts, ``train`` and ``held_out``, that share nothing: a held-out row speaks of a person and a
thing no training row knows, and half of the held-out rows use a frame no training row was written in.

A frame's slots: ``{person}``, ``{a_item}`` (with its article), ``{item}`` (bare), ``{amount}``, ``{date}``,
``{method}``. A slot the frame lacks is null in the record.
"""

FIRST_NAMES = {
    "train": (
        *("Maya", "Jonas", "Priya", "Tomas", "Leila", "Oscar", "Ingrid", "Samuel", "Chiara", "Dmitri"),
        *("Hannah", "Kofi", "Beatriz", "Liam", "Yuki", "Omar", "Clara", "Pavel", "Nadia", "Victor"),
        *("Esther", "Rafael", "Sofia", "Anders", "Grace", "Mehmet", "Julia", "Caleb", "Amina", "Felix"),
        *("Rosa", "Daniel", "Noor", "Peter", "Helena", "Marcus"),
    ),
    "held_out": (
        *("Miriam", "Stefan", "Aisha", "Bruno", "Katya", "Edwin", "Lucia", "Hassan", "Freya", "Simon"),
        *("Tara", "Nils"),
    ),
}

LAST_NAMES = {
    "train": (
        *("Lindqvist", "Okafor", "Marino", "Petrov", "Sharma", "Keller", "Novak", "Silva", "Tanaka", "Murphy"),
        *("Haddad", "Weber", "Costa", "Jensen", "Mensah", "Rossi", "Fischer", "Dubois", "Alvarez", "Nowak"),
        *("Hughes", "Demir", "Larsen", "Fontaine", "Bauer", "Castillo", "Ivanova", "Parker", "Moreau", "Khan"),
        *("Virtanen", "Brooks", "Schmidt", "Ortega", "Walsh", "Lopez"),
    ),
    "held_out": (
        *("Bergman", "Adeyemi", "Conti", "Sokolov", "Patel", "Hoffmann", "Ramos", "Byrne", "Suzuki", "Laurent"),
        *("Carter", "Holm"),
    ),
}

# (article, thing); "some" for what cannot be counted.
ITEMS = {
    "train": (
        *(("a", "train ticket"), ("an", "office chair"), ("a", "desk lamp"), ("some", "printer paper")),
        *(("a", "hotel room"), ("a", "taxi ride"), ("a", "team lunch"), ("an", "umbrella"), ("a", "wall clock")),
        *(("a", "bus pass"), ("a", "phone charger"), ("some", "coffee beans"), ("a", "whiteboard")),
        *(("a", "flight to Oslo"), ("a", "rental car"), ("a", "birthday cake"), ("an", "ink cartridge")),
        *(("a", "keyboard"), ("a", "used bicycle"), ("some", "garden soil"), ("a", "museum ticket")),
        *(("a", "cleaning service"), ("a", "parking permit"), ("a", "box of pencils"), ("a", "first aid kit")),
        *(("a", "webcam"), ("a", "client dinner"), ("an", "extension cord"), ("a", "coffee machine")),
        *(("a", "textbook"), ("some", "wall paint"), ("a", "ferry crossing"), ("a", "language course")),
        *(("a", "pair of headphones"), ("a", "window repair"), ("a", "water filter"), ("some", "envelopes")),
        *(("a", "conference badge"), ("a", "tool set"), ("a", "bookshelf"), ("a", "monthly newspaper")),
        *(("a", "trade magazine"), ("an", "electric kettle"), ("a", "flight to Madrid"), ("a", "haircut")),
        *(("a", "safety helmet"), ("a", "gift basket"), ("a", "street map"), ("some", "light bulbs")),
        *(("a", "suitcase"), ("a", "standing desk"), ("a", "dental visit"), ("a", "tablet stand")),
        *(("a", "printer repair"), ("a", "bunch of flowers"), ("some", "sandwiches"), ("a", "locksmith visit")),
    ),
    "held_out": (
        *(("a", "flight to Vienna"), ("a", "laptop sleeve"), ("some", "green tea"), ("a", "filing cabinet")),
        *(("an", "air filter"), ("a", "concert ticket"), ("a", "box of markers"), ("a", "team breakfast")),
        *(("a", "night train"), ("a", "projector"), ("some", "copper wire"), ("an", "oil change")),
        *(("a", "pair of gloves"), ("a", "garden hose"), ("a", "cooking class"), ("a", "boat rental")),
    ),
}

METHOD_PHRASES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "card": ("by card", "by credit card", "with a debit card", "using the company card", "on a credit card"),
        "cash": ("in cash", "with cash", "cash in hand"),
        "transfer": ("by bank transfer", "by transfer", "with a bank transfer", "by wire transfer"),
    },
    "held_out": {
        "card": ("with the office card", "by debit card"),
        "cash": ("with cash from the till", "in cash"),
        "transfer": ("via bank transfer", "through a wire transfer"),
    },
}

FRAMES = {
    "train": (
        # everything is said
        "{person} paid {amount} {method} for {a_item} on {date}.",
        "On {date}, {person} bought {a_item} for {amount} and paid {method}.",
        "{date}: {person} spent {amount} on {a_item}, paid {method}.",
        "Please book {a_item} for {person}: {amount}, settled {method} on {date}.",
        "{a_item} cost {person} {amount} on {date}; the payment was made {method}.",
        "{person} picked up {a_item} on {date} and settled the {amount} {method}.",
        "{amount} went out {method} on {date} for {a_item}, claimed by {person}.",
        "Hi, {person} here. I got {a_item} on {date} for {amount}, paid {method}.",
        "Expense from {person}, dated {date}: {item}, {amount}, {method}.",
        "It was {person} who paid {method} for {a_item} on {date}, {amount} in all.",
        "The {amount} for {a_item} was paid {method} by {person} on {date}.",
        "Refund {person} {amount}: {item}, bought on {date}, paid {method}.",
        # the method is missing
        "{person} bought {a_item} on {date} for {amount}.",
        "On {date} {person} spent {amount} on {a_item}.",
        "{a_item} for {amount}, bought by {person}, {date}.",
        "{person} claims {amount} for {a_item} from {date}.",
        "We owe {person} {amount} for {a_item}, see the receipt of {date}.",
        "Note for {date}: {person} ordered {a_item}, {amount}.",
        # the date is missing
        "{person} paid {amount} for {a_item} {method}.",
        "{person} got {a_item} and paid the {amount} {method}.",
        "Paid {method} by {person}: {item}, {amount}.",
        "{a_item} was bought by {person} for {amount}, {method}.",
        "{person} asks for {amount} back, spent {method} on {a_item}.",
        # both are missing
        "{person} needed {a_item} and spent {amount}.",
        "{item}, {amount}, {person}.",
        "{person} says {a_item} came to {amount}.",
        "That was {amount} for {a_item}, {person} has the receipt.",
        # nobody is named
        "Bought {a_item} for {amount} on {date}, paid {method}.",
        "{date}, {item}, {amount}, {method}.",
        "We paid {amount} {method} for {a_item} on {date}.",
        "Somebody bought {a_item} on {date}; it cost {amount}.",
        "{a_item} on {date} came to {amount}.",
        "Spent {amount} on {a_item}, {method}.",
        "There is a bill of {amount} for {a_item}, paid {method}.",
        "{amount} for {a_item}, no name on the receipt.",
        "The office paid {amount} for {a_item}.",
    ),
    "held_out": (
        "For {a_item}, {person} handed over {amount} {method} on {date}.",
        "{person} reports: {a_item}, {amount}, bought {date}, paid {method}.",
        "On {date} an amount of {amount} was paid {method} by {person} for {a_item}.",
        "{person} treated us to {a_item} on {date}, which came to {amount}.",
        "Dated {date}: {amount}, {a_item}, submitted by {person}.",
        "{person} had to pay {amount} {method} to get {a_item}.",
        "Please pay {person} back {amount} for {a_item}.",
        "On {date} we bought {a_item} and paid {amount} {method}.",
        "We spent {amount} on {a_item} on {date}.",
        "A receipt for {a_item}: {amount}, paid {method}.",
    ),
}

# Remarks that change nothing in the record; one goes before or after about a quarter of the sentences.
REMARKS = {
    "train": (
        ("", "The receipt is attached."),
        ("", "Sorry for the late note."),
        ("", "It was urgent."),
        ("", "Please file it."),
        ("Hello!", ""),
        ("One more:", ""),
        ("", "Thanks a lot."),
        ("For the books.", ""),
    ),
    "held_out": (
        ("", "The invoice will follow."),
        ("Good morning.", ""),
        ("", "No hurry."),
    ),
}

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# code: (symbol or None, unit word, unit of one, hundredths word)
CURRENCY_WORDS: dict[str, tuple[str | None, str, str, str]] = {
    "EUR": ("€", "euros", "euro", "cents"),
    "USD": ("$", "dollars", "dollar", "cents"),
    "GBP": ("£", "pounds", "pound", "pence"),
    "CHF": (None, "Swiss francs", "Swiss franc", "centimes"),
}

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS_WORDS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
