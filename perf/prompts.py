"""English text that the workloads are cut from: long openings and short questions."""

from __future__ import annotations

READER_OPENINGS: tuple[str, ...] = (
    (
        "The lighthouse on the northern cape was built after three ships were lost in a single "
        "winter. Its keeper, a quiet man with two daughters, lit the lamp every evening at dusk "
        "and climbed the ninety-one steps twice each night to trim the wick. The older daughter "
        "learned to read the weather from the colour of the water, and the younger one kept a "
        "diary of every sail that passed. When the fog came in so thick that the beam could not "
        "reach the rocks, the family took turns at the bell, one stroke every half minute, until "
        "the morning. The diary has survived, and it tells, day by day, how a lonely tower "
        "slowly became the centre of a small village. Its first page begins with these words:"
    ),
    (
        "Bread is one of the oldest foods that people make, and also one of the simplest: flour, "
        "water, salt and time. A baker who works with a natural starter keeps a jar of flour and "
        "water alive for years, feeding it every day with a little more of each. Wild yeast "
        "makes the gas that lifts the dough, and bacteria make the acids that give it flavour "
        "and keep it fresh. The kitchen's temperature decides how fast all of this happens, so "
        "no two days are quite alike. To bake a loaf at home you need no machine at all, only a "
        "bowl, a heavy pot with a lid, an oven and some patience. Here is the whole process, "
        "step by step, for a beginner who has never baked before:"
    ),
    (
        "Long before there were accurate clocks, sailors could find how far north or south they "
        "were by measuring the height of the sun at noon. How far east or west they had come was "
        "a much harder question, because the answer depends on knowing the time at home while "
        "looking at the sky abroad. Pendulum clocks lost their beat on a rolling deck, and heat, "
        "cold and damp made every spring run fast or slow. A large prize was offered for a "
        "method that worked, and for decades astronomers and instrument makers competed for it. "
        "In the end it was a carpenter's son who built a watch that kept time across an ocean. "
        "The story of how he did it is a story about stubbornness, friction and very small "
        "screws:"
    ),
    (
        "A city park looks calm from the path, but under the grass it is as busy as any street. "
        "Worms pull leaves into the soil, fungi trade minerals for sugar with the roots of the "
        "trees, and beetles hunt in the dark for slugs and eggs. In one handful of earth there "
        "are more living things than there are people on the planet. Gardeners who learn to look "
        "after this hidden world need less water, less fertiliser and less work. They leave "
        "fallen leaves under the hedges, they dig as little as they can, and they let some "
        "corners grow wild. The result is not an untidy park but a richer one, with more birds, "
        "more flowers and cooler air in summer. If you want to try the same in your own garden, "
        "these are the most important things to know:"
    ),
    (
        "My grandmother repaired radios in a small workshop behind the railway station. People "
        "brought her sets that had fallen silent, and she listened to their silence first, with "
        "her head tilted, before she reached for a screwdriver. A hum meant one thing, a crackle "
        "another, and a faint smell of warm dust told her which part had given up. She wrote "
        "every repair into a thick green book: the date, the name, the fault and the cure. When "
        "she retired she gave the book to me and said that it was the only manual worth having. "
        "I was eleven years old and had never held a soldering iron in my life. That summer I "
        "decided to repair the first radio in the book, which still stood on the highest shelf, "
        "and it went like this:"
    ),
    (
        "Glaciers are rivers of ice. Snow that falls high in the mountains is pressed by the "
        "snow of later winters until the air is squeezed out and only blue ice remains, and then "
        "the whole mass begins to slide downhill under its own weight, a few metres or a few "
        "hundred metres a year. As it moves, it scrapes valleys into a round shape, carries "
        "boulders as large as houses, and grinds rock into a flour so fine that it turns lakes "
        "milky green. Scientists drill into the ice and bring up cores in which every year has "
        "left a thin layer, with bubbles of ancient air trapped between them. From these layers "
        "one can read the climate of the past like the pages of a book. Among the things that "
        "they have taught us are the following:"
    ),
    (
        "The first rule of the night train was that nobody asked where anybody was going. "
        "Passengers boarded in the dark with small suitcases, nodded to the conductor and "
        "disappeared behind the curtains of their bunks. Around midnight the dining car filled "
        "with people who could not sleep: a violinist without a violin, a retired judge, a girl "
        "who was moving to the coast to study whales. The cook made the same soup every night "
        "and refused to say what was in it. Outside, the plain went by without a single light, "
        "and the wheels kept a rhythm that made strangers talk more freely than they would have "
        "done in daylight. On the night of which I want to tell you, the train stopped where "
        "there was no station, and the conductor came in and said:"
    ),
    (
        "Learning to play an instrument as an adult is different from learning as a child, and "
        "in some ways it is easier. An adult knows how to practise with a plan, can hear what is "
        "wrong, and has chosen to be there. What an adult lacks is time, and the patience to "
        "sound bad for a while. Teachers advise to play every day for a short time rather than "
        "once a week for long, to sing each phrase before playing it, and to slow down until "
        "there are no mistakes. They also advise to play with others as early as possible, even "
        "if it is only three notes, because rhythm is something that we learn from each other. "
        "After a year most people are surprised by how far they have come. A sensible plan for "
        "the first twelve weeks could look like this:"
    ),
)

QUESTIONS: tuple[str, ...] = (
    (
        "Why is the sky blue during the day but red in the evening? Please answer in a few "
        "sentences that a curious ten-year-old child would enjoy, and finish with one small "
        "experiment that it can do at home with a glass of water and a lamp."
    ),
    (
        "What is the difference between weather and climate? Give one example of each, and "
        "explain in plain words why a cold week in one town says very little about how the whole "
        "planet is changing over the years."
    ),
    (
        "How does a refrigerator keep food cold when its motor produces heat? Describe the path "
        "of the heat from the milk on the shelf to the air of the kitchen, without using any "
        "difficult technical words."
    ),
    (
        "Which three vegetables are the easiest for someone who has only a balcony and has never "
        "grown anything before? For each of them say when to sow it, how much water it wants and "
        "when it can be eaten."
    ),
    (
        "My bicycle makes a clicking noise whenever I pedal hard, but not when I roll down a "
        "hill. What are the most likely reasons, in which order should I check them, and which "
        "tools do I need for that?"
    ),
    (
        "Write a short and friendly message to my neighbour that asks her to water my plants for "
        "a week in August. The key is under the blue pot, and the tomatoes need more water than "
        "all of the others do."
    ),
    (
        "What happens in the body while we sleep, and why do people feel so tired after a night "
        "with too little of it? Keep the answer short, and mention memory, mood and the immune "
        "system in it."
    ),
    (
        "Explain how a bank earns money when it lends me some, and why it asks for interest. Use "
        "a small example with easy numbers, so that I can check the calculation myself on a "
        "sheet of paper."
    ),
    (
        "I have eggs, rice, spinach and half a lemon in the kitchen and twenty minutes of time. "
        "Suggest a simple dinner for two people, with the steps in the right order and a tip "
        "against sticky rice."
    ),
    (
        "How do bees find their way back to the hive after a long flight over fields that all "
        "look the same? Name the things that they use to find the way, and tell me which of them "
        "works on cloudy days."
    ),
    (
        "What is a good way to remember the names of new people at a meeting? Give me three "
        "methods that work without any notes, and say for each of them why it helps the memory "
        "to hold on to the name."
    ),
    (
        "Please summarise the idea of supply and demand in four sentences, and then explain with "
        "it why umbrellas are more expensive at the station on a rainy day than in a shop on the "
        "edge of town."
    ),
    (
        "Why do some metals rust while others stay bright for many years? Compare iron, "
        "aluminium and gold, and tell me what I can do to protect the garden gate that I have "
        "painted only last spring."
    ),
    (
        "I would like to start running, but I get out of breath after two minutes. Suggest a "
        "plan for the first month that is kind to my knees, and tell me how I can notice that I "
        "make progress."
    ),
    (
        "How does a sailing boat manage to move against the wind at all? Explain it in words, "
        "without a drawing, and tell me which part the keel under the boat plays in this, and "
        "which part the sail."
    ),
    (
        "What should I look for when I buy a used laptop from a private seller? List the five "
        "most important checks that take less than ten minutes all together, and need no special "
        "software."
    ),
)
