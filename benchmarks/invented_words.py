"""The vocabulary of invented_set.py: kinds of things, their attributes, and each attribute's values
in three wordings.

Of a value's wordings passages use the first; questions use any.
"""

from typing import NamedTuple


class Attribute(NamedTuple):
    """One property: the clause that a question makes of it, and its values, each in three
    wordings."""

    question: str
    values: tuple[tuple[str, str, str], ...]


class Kind(NamedTuple):
    """One kind of thing: what questions call it, how passages describe it, and its attributes by
    their letter."""

    nouns: tuple[str, ...]
    passages: tuple[str, ...]
    attributes: dict[str, Attribute]


PLANTS = Kind(
    nouns=("plant", "herb", "wild flower"),
    passages=(
        "{name} grows {a} and flowers {b}. Its {c} petals are visited by {d}. The root is good "
        "{e}, but the plant {f}.",
        "{name} has {c} petals that open {b}. It is visited by {d} and grows {a}. It {f}, yet the "
        "root is good {e}.",
        "Visited by {d}, {name} flowers {b} and grows {a}. The root is good {e}. Its petals are "
        "{c}, and it {f}.",
    ),
    attributes={
        "a": Attribute(
            "thrives {}",
            (
                ("in salt marshes", "on soggy coast", "in brackish wetland"),
                ("on chalk cliffs", "on steep white rock", "on pale stone walls"),
                ("in pine forests", "under evergreen trees", "among conifers"),
                ("along river banks", "beside running water", "at a stream's edge"),
                ("on mountain meadows", "in high pastures", "on alpine grassland"),
                ("in orchard hedges", "between fruit trees", "around apple gardens"),
                ("on volcanic ash", "near old craters", "where lava once ran"),
                ("in limestone caves", "in underground hollows", "far from daylight"),
            ),
        ),
        "b": Attribute(
            "blooms {}",
            (
                ("in midwinter", "in the coldest weeks", "around January"),
                ("in early spring", "as snow melts", "around March"),
                ("at midsummer", "when days are longest", "around June"),
                ("in late autumn", "as leaves fall", "around November"),
                ("after heavy rain", "following a downpour", "once storms have passed"),
                ("only at night", "after dark", "while others sleep"),
                ("at dawn", "at first light", "as morning breaks"),
                ("during droughts", "in dry spells", "while wells run empty"),
            ),
        ),
        "c": Attribute(
            "has {} blossoms",
            (
                ("crimson", "deep red", "blood coloured"),
                ("azure", "sky blue", "bluish"),
                ("ivory", "creamy", "off-white"),
                ("amber", "honey yellow", "golden"),
                ("violet", "purple", "plum coloured"),
                ("jet", "black", "coal dark"),
                ("russet", "reddish brown", "rusty"),
                ("silver", "shiny grey", "metallic"),
            ),
        ),
        "d": Attribute(
            "depends on {}",
            (
                ("bats", "flying mammals", "leather-winged hunters"),
                ("hummingbirds", "tiny hovering birds", "long-beaked nectar drinkers"),
                ("beetles", "hard-shelled insects", "armoured crawlers"),
                ("bumblebees", "furry buzzing insects", "plump honey gatherers"),
                ("ants", "marching workers", "hill dwelling insects"),
                ("mice", "small rodents", "whiskered nibblers"),
                ("snails", "slow shelled creatures", "slimy climbers"),
                ("geckos", "small lizards", "sticky-footed reptiles"),
            ),
        ),
        "e": Attribute(
            "has a root good {}",
            (
                ("against toothache", "for soothing sore gums", "for pain while eating"),
                ("for repelling mosquitoes", "for driving insects away", "as protective smoke"),
                ("for twisting rope", "for making cord", "for tying boats"),
                ("for lamp oil", "for lighting rooms", "as lantern fuel"),
                ("for grinding flour", "for baking bread", "as cheap wheat"),
                ("for boiling dye", "for tinting cloth", "for colouring wool"),
                ("against aching joints", "for easing stiff knees", "against rheumatism"),
                ("for flavouring beer", "for brewers", "for seasoning ale"),
            ),
        ),
        "f": Attribute(
            "{}",
            (
                ("poisons sheep", "kills grazing flocks", "is deadly for lambs"),
                ("stains hands", "marks the skin", "soils the fingers"),
                ("smells of rotten fish", "stinks like herring", "has a foul odour"),
                ("strangles young trees", "chokes saplings", "smothers woody neighbours"),
                ("causes vivid dreams", "disturbs sleepers", "brings nightly visions"),
                ("corrodes iron", "eats through metal", "ruins knives"),
                ("withers when touched", "shrivels under fingers", "cannot bear contact"),
                ("clogs wells", "blocks water supplies", "fills shafts and springs"),
            ),
        ),
    },
)

MACHINES = Kind(
    nouns=("machine", "device", "apparatus"),
    passages=(
        "The {name} engine {a}. It is driven by {b}, made of {c} and tended by {d}. At work it "
        "{e}; it fails {f}.",
        "Made of {c} and driven by {b}, the {name} engine {a}. It is tended by {d}. It fails {f}, "
        "and at work it {e}.",
        "Tended by {d}, the {name} engine {a}. At work it {e}. It is made of {c}, is driven by {b} "
        "and fails {f}.",
    ),
    attributes={
        "a": Attribute(
            "{}",
            (
                ("sorts coins", "separates money by size", "puts change in order"),
                ("pumps out mines", "keeps tunnels dry", "lifts water from shafts"),
                ("weaves carpets", "produces rugs", "makes floor coverings"),
                ("peels potatoes", "skins vegetables", "prepares tubers"),
                ("copies letters", "duplicates handwriting", "reproduces written pages"),
                ("polishes lenses", "smooths spectacles", "finishes optical glass"),
                ("shuffles cards", "mixes a deck", "prepares gambling"),
                ("harvests barley", "brings in grain", "mows cereal"),
            ),
        ),
        "b": Attribute(
            "runs on {}",
            (
                ("steam", "a boiler", "hot vapour"),
                ("falling water", "a mill stream", "a cascade"),
                ("treadmill dogs", "trotting hounds", "four-legged runners"),
                ("sunlight", "solar heat", "bright days"),
                ("magnets", "lodestones", "attracting metal bars"),
                ("sinking weights", "heavy stones", "gravity"),
                ("gusts of wind", "sails", "moving air"),
                ("burning peat", "turf fires", "fuel from bogs"),
            ),
        ),
        "c": Attribute(
            "consists of {}",
            (
                ("oak", "hard timber", "acorn wood"),
                ("cast iron", "poured metal", "foundry pieces"),
                ("porcelain", "fine china", "glazed clay"),
                ("bamboo", "hollow canes", "giant grass"),
                ("granite", "speckled rock", "hard stone"),
                ("stretched leather", "tanned hides", "cow skin"),
                ("blown glass", "transparent tubes", "shattering panes"),
                ("papier-mache", "pulp and glue", "old newspapers"),
            ),
        ),
        "d": Attribute(
            "is cared for by {}",
            (
                ("monks", "brothers of an abbey", "cloistered men"),
                ("apprentices", "young learners", "trainees"),
                ("widows", "lonely women", "bereaved wives"),
                ("retired sailors", "old seamen", "former mariners"),
                ("astronomers", "star watchers", "observers of planets"),
                ("prisoners", "convicts", "people behind bars"),
                ("schoolteachers", "instructors of children", "classroom staff"),
                ("gravediggers", "cemetery workers", "burial men"),
            ),
        ),
        "e": Attribute(
            "{}",
            (
                ("hums softly", "drones quietly", "murmurs"),
                ("whistles", "sounds shrill", "sings like kettles"),
                ("trembles violently", "shakes hard", "makes floors quake"),
                ("drips oil", "leaves greasy puddles", "leaks lubricant"),
                ("smells of vinegar", "has sour fumes", "reeks of pickles"),
                ("glows faintly", "shines a little", "gleams dimly"),
                ("chimes each hour", "rings like clocks", "marks time with bells"),
                ("rattles loudly", "clatters", "deafens people"),
            ),
        ),
        "f": Attribute(
            "breaks down {}",
            (
                ("in hard frost", "when it freezes", "on icy days"),
                ("in thick fog", "when mist is dense", "in poor sight"),
                ("when overloaded", "if given too much", "under excessive burden"),
                ("when rats gnaw its belts", "because of rodents", "through vermin"),
                ("in damp weather", "when air is moist", "in humidity"),
                ("during thunderstorms", "with lightning about", "on electric evenings"),
                ("when left idle", "after long rest", "if nobody uses it"),
                ("at full moon", "once a month", "on brightest nights"),
            ),
        ),
    },
)

TOWNS = Kind(
    nouns=("town", "settlement", "place"),
    passages=(
        "{name} lies {a} and lives on {b}. Its {c} is known to all. It is ruled by {d}, feasts {e} "
        "and fears {f}.",
        "Ruled by {d}, {name} lies {a}. It feasts {e}, is known for its {c}, lives on {b} and "
        "fears {f}.",
        "{name} lives on {b} and fears {f}. It lies {a}, is ruled by {d} and feasts {e}. "
        "Travellers know its {c}.",
    ),
    attributes={
        "a": Attribute(
            "stands {}",
            (
                ("at a mountain pass", "between two peaks", "on a high crossing"),
                ("beside a glacier", "next to moving ice", "under frozen slopes"),
                ("on a windy plateau", "on flat highland", "on breezy tableland"),
                ("in a deep gorge", "between sheer walls", "in a ravine"),
                ("at a desert oasis", "among palms and sand", "around arid springs"),
                ("by a hidden harbour", "near secret anchorage", "where ships shelter"),
                ("in dense jungle", "among tropical trees", "in steaming rainforest"),
                ("on rolling moorland", "amid heather", "on boggy hills"),
            ),
        ),
        "b": Attribute(
            "earns money from {}",
            (
                ("herring", "barrelled fish", "netted catches"),
                ("cheese", "dairies", "curds and rind"),
                ("saffron", "costly spice", "crocus threads"),
                ("horse breeding", "raising foals", "stables and mares"),
                ("salt pans", "evaporated seawater", "white crystals"),
                ("timber rafts", "floating logs", "wood sent downstream"),
                ("glove making", "finger clothing", "sewing for hands"),
                ("bee keeping", "hives", "wax and honey"),
            ),
        ),
        "c": Attribute(
            "boasts a {}",
            (
                ("leaning tower", "crooked steeple", "tilted building"),
                ("covered bridge", "roofed crossing", "sheltered span"),
                ("floating market", "trade on boats", "watery bazaar"),
                ("botanical garden", "rare collection of trees", "park for scholars"),
                ("ruined castle", "crumbling fortress", "fallen stronghold"),
                ("puppet theatre", "marionette stage", "doll show"),
                ("hot spring", "natural warm bath", "steaming pool"),
                ("water clock", "dripping timepiece", "liquid measure of hours"),
            ),
        ),
        "d": Attribute(
            "obeys {}",
            (
                ("a child queen", "an enthroned girl", "a young monarch"),
                ("a council of elders", "the oldest citizens", "grey-haired advisers"),
                ("an exiled duke", "a banished nobleman", "a homeless aristocrat"),
                ("the harbour master", "the port's chief", "a docks official"),
                ("a guild of masons", "brick layers", "united stone workers"),
                ("an abbess", "a convent's head", "a nun"),
                ("a lottery winner", "whoever chance picks", "someone drawn by lot"),
                ("a travelling merchant", "an absent trader", "a wandering dealer"),
            ),
        ),
        "e": Attribute(
            "celebrates {}",
            (
                ("at the first snow", "when flakes appear", "as white winter arrives"),
                ("at harvest", "when crops are in", "after reaping"),
                ("on the longest night", "at winter solstice", "in greatest darkness"),
                ("at each eclipse", "when the sun hides", "as the moon covers daylight"),
                ("after a wedding", "whenever couples marry", "for every bride"),
                ("when the ice breaks", "as thaw begins", "once rivers run free"),
                ("at the wine pressing", "when grapes are trodden", "as vintners finish"),
                ("at spring tide", "when seas are highest", "as the flood peaks"),
            ),
        ),
        "f": Attribute(
            "dreads {}",
            (
                ("wolves", "howling packs", "grey predators"),
                ("pirates", "sea robbers", "raiding ships"),
                ("locusts", "swarming insects", "hungry hoppers"),
                ("floods", "rising water", "swollen rivers"),
                ("earthquakes", "shaking ground", "tremors"),
                ("ghosts", "spirits of the dead", "apparitions"),
                ("plague", "contagious sickness", "deadly epidemics"),
                ("sandstorms", "flying dust", "gritty gales"),
            ),
        ),
    },
)

KINDS = (PLANTS, MACHINES, TOWNS)
