"""Prompts: two for each of Spec-Bench's six kinds, written for this project."""

from dataclasses import dataclass

KINDS = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Prompt:
    """One user message and its Spec-Bench kind."""

    kind: str
    text: str


def _prompt(kind: str, text: str) -> Prompt:
    """Return a prompt whose paragraphs are single lines; below they are broken to be readable."""
    assert kind in KINDS
    return Prompt(kind, "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")))


PROMPTS: list[Prompt] = [
    _prompt(
        "multi_turn",
        """Write a friendly e-mail to the neighbours in my apartment building. We want to turn the unused yard behind
        the house into a small vegetable garden, we need four volunteers for the first Saturday in April, and tools and
        lunch are provided. End with a way to sign up.""",
    ),
    _prompt(
        "multi_turn",
        """Write a Python function `merge_intervals(intervals)` that takes a list of (start, end) tuples and returns
        the merged, sorted intervals. Explain in two sentences why sorting first makes it simple. Then write a second
        function, `total_length(intervals)`, that uses the first one, and show both on a small example.""",
    ),
    _prompt(
        "translation",
        """Translate German to English: Am frühen Morgen fuhr der erste Zug über die neue Brücke, und am Ufer standen
        trotz des Regens viele Menschen, die lange auf diesen Augenblick gewartet hatten.""",
    ),
    _prompt(
        "translation",
        """Translate German to English: Die Bibliothek bleibt wegen der Bauarbeiten bis Ende des Monats geschlossen.
        Ausgeliehene Bücher können in dieser Zeit im Rathaus abgegeben werden, und alle Leihfristen werden um vier
        Wochen verlängert.""",
    ),
    _prompt(
        "summarization",
        """Summarize the following article in three sentences.

        For most of the last century the harbour of Vellmar was a place that people drove past. The fish market had
        closed, the cranes stood still, and the long brick warehouses along the northern quay were used by no one but
        pigeons. When the town council put the quay up for sale eleven years ago, there was not a single bid.

        What happened next was not planned. A boat builder named Ines Korda asked whether she could rent one warehouse
        for a single winter, because the roof of her own workshop had been damaged in a storm. The council agreed and
        asked for a symbolic rent. Korda needed electricity, so she shared the cost of a new cable with a bakery that
        was looking for a cheap place to put its ovens. The bakery sold bread from a window on Saturdays, and because
        people came for the bread, a coffee stand followed. By the end of the second year, nineteen small businesses
        had moved into the warehouses, and the council had stopped looking for a buyer.

        Today the northern quay employs about four hundred people. The boat workshop trains six apprentices each year,
        and the bakery delivers to every school in the town. A study by the regional university found that three out of
        four businesses on the quay had been founded by people who had never run a company before. The authors of the
        study believe that the low rent mattered less than the short contracts: because tenants could leave after six
        months, they dared to try ideas that a bank would not have paid for.

        Success has brought new worries. Rents on the streets behind the quay have risen by a third, and some families
        who have lived there for decades can no longer afford to stay. The council now wants to build one hundred and
        twenty apartments with fixed rents on the site of the old customs yard. Korda supports the plan, but she warns
        against tidying up the harbour too much. "Nobody designed this place," she says. "If we had waited for a
        design, the pigeons would still be here on their own." The council will vote on the plan in the autumn.""",
    ),
    _prompt(
        "summarization",
        """Summarize the following article in three sentences.

        The night train between Orlen and Santa Brida will run again from next summer, fourteen years after the last
        sleeping car was taken out of service. The operator, a cooperative owned by nine thousand passengers, announced
        on Tuesday that it has bought twenty-two used carriages and will have them rebuilt in a workshop near the
        border. The journey of eleven hundred kilometres will take just under thirteen hours.

        The old connection was closed because it lost money. Cheap flights had taken most of its passengers, and the
        carriages were so old that spare parts had to be made by hand. The cooperative believes that both problems can
        be solved. Flights on the route have become more expensive since the fuel tax was raised, and the airport in
        Santa Brida no longer accepts departures after ten in the evening. The rebuilt carriages use the same doors,
        brakes and air conditioning as ordinary regional trains, so any depot along the line can repair them.

        A bed in a cabin for four will cost from 69 euros, a private cabin from 189 euros. Each train will have room
        for 340 passengers and 24 bicycles, as well as a dining car run by a cooking school. The trains will leave
        Orlen at seven in the evening and arrive in time for breakfast. According to the cooperative, six out of ten
        beds must be sold for the service to pay for itself, and a survey among travellers suggests that this will be
        reached in the second year.

        Not everyone is convinced. The railway union points out that the border station, where the locomotive has to
        be changed, is not staffed at night, and that a single delay there could block the line for freight trains.
        Environmental groups welcome the project but complain that the ministry has paid nothing towards it, although
        it spent forty million euros on enlarging the airport. The ministry replied that it will review its position
        after the first full year of service. Tickets go on sale in March, and members of the cooperative may book two
        weeks earlier than everyone else.""",
    ),
    _prompt("qa", "Why does the Moon always show the same side to the Earth?"),
    _prompt("qa", "What is the longest river in South America, and through which countries does it flow?"),
    _prompt(
        "math_reasoning",
        """A baker makes 18 trays of rolls with 24 rolls on each tray. In the morning she sells two thirds of all the
        rolls at 0.50 dollars each, and in the afternoon she sells the rest at half that price. How many dollars does
        she take in on that day? Explain each step.""",
    ),
    _prompt(
        "math_reasoning",
        """Tom cycles to his grandmother, who lives 36 kilometres away. He rides the first half of the way at 12
        kilometres per hour and the second half at 18 kilometres per hour, and he rests for 20 minutes in between. How
        many minutes does the whole trip take? Explain each step.""",
    ),
    _prompt(
        "rag",
        """Answer the question with the help of the passages below, and name the passage that your answer is from.

        Passage 1: The lighthouse on Gull Rock was built between 1868 and 1871 from granite that was quarried on the
        mainland and carried over at low tide. Its tower is 31 metres high and stands on a base that is twice as wide
        as the lantern room, so that the winter waves run up the wall instead of striking it. The first lamp burned
        rapeseed oil and had to be refilled three times each night. Two keepers and their families lived in the low
        house beside the tower, and in bad winters no boat could reach them for as long as seven weeks. The logbooks
        they kept are still used by weather researchers.

        Passage 2: Electric light came to Gull Rock in 1927, when a cable was laid from the village of Harrow Point.
        The cable broke so often that a diesel generator was added six years later. With the stronger lamp the light
        could be seen at a distance of 21 nautical miles, nearly twice as far as before. Fishermen from the village
        complained at first, because the bright beam kept the herring away from the bay at night. The dispute ended
        when the keepers agreed to shade the lamp on the landward side, and the painted glass panes that they used for
        this are now shown in the village museum.

        Passage 3: The last keeper, Maud Ellery, left Gull Rock in 1984, when the light was made automatic. She had
        lived there for 22 years and was the only woman on that coast to hold the post. Since then the tower has been
        visited by an engineer twice a year. Solar panels replaced the generator in 2006. The keepers' house stood
        empty for a long time, until a trust bought it and repaired the roof. It now takes up to eight guests in
        summer, and the income pays for the upkeep of the landing stage and the path.

        Passage 4: Grey seals rest on the southern side of Gull Rock throughout the year, and about sixty pups are born
        there each autumn. Because the animals are easily disturbed, landing is not allowed between September and
        January. Boats from Harrow Point may pass at a distance of two hundred metres. The rock is also home to one of
        the largest colonies of kittiwakes in the region, with almost nine hundred nests at the last count. Volunteers
        count the birds from a boat in June, when the chicks are large enough to be seen from the water.

        Question: Why did the keepers of the lighthouse shade the lamp on the landward side?""",
    ),
    _prompt(
        "rag",
        """Answer the question with the help of the passages below, and name the passage that your answer is from.

        Passage 1: Sourdough bread rises because of wild yeasts and bacteria that live together in a starter of flour
        and water. The yeasts produce the gas that lifts the dough, while the bacteria produce lactic and acetic acid,
        which give the bread its taste. A starter that is kept warm favours lactic acid and tastes mild, like yoghurt.
        A starter that is kept cool and stiff favours acetic acid and tastes sharper. Bakers feed the starter with
        fresh flour at least once a day when it stands in the kitchen, and about once a week when it is kept in the
        refrigerator, where everything in it happens more slowly.

        Passage 2: The acids in sourdough do more than add flavour. They slow down the moulds that would otherwise
        spoil the loaf, so that a sourdough bread stays good for four to six days, while a plain yeast bread often
        turns mouldy after three. They also weaken an enzyme in rye flour that breaks down starch. Without the acid
        this enzyme would turn the inside of a rye loaf into a wet and sticky mass during baking. This is why nearly
        all traditional rye breads are made with sourdough, and why wheat breads can do without it.

        Passage 3: Steam in the oven decides how a loaf looks. In the first ten minutes it condenses on the cool dough
        and keeps the surface soft, so that the bread can grow to its full size before a crust forms. The water also
        dissolves starch on the surface, which later dries to a thin and shiny layer. Professional ovens blow steam
        into the chamber at the press of a button. At home, bakers pour water into a hot pan or bake in a heavy pot
        with a lid, which traps the moisture of the dough itself. After the first part the steam is let out, so that
        the crust can dry and turn brown.

        Passage 4: Salt makes up about two percent of the weight of the flour in most breads. It tightens the gluten,
        so that the dough holds its shape, and it slows the yeast, so that there is more time for flavour to develop.
        Dough without salt rises fast, spreads out flat and tastes dull. Some bakers add the salt only after the flour
        has soaked in water for half an hour, because the flour takes up water more easily without it. Too much salt
        stops the fermentation altogether, which is why salt and yeast are not left lying together for a long time.

        Question: Why are traditional rye breads usually made with sourdough, while wheat breads can do without it?""",
    ),
]
