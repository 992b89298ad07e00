"""What every op family needs at hand: the tape, the run, and where activations are sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from jettison.formula.tape import Places, Saved, Tape, Value, Weight
from jettison.ledger.program import Source
from jettison.spec.fp8 import Fp8Recipe
from jettison.spec.kernels import Device, Kernels
from jettison.spec.products import WIDE, Rule, rule_for
from jettison.spec.run import Scene
from jettison.spec.tuning import Base

RANDOM_STATE_BYTES = {Device.CPU: 5056, Device.CUDA: 0}
"""Of the default generator. A CUDA generator's 16 bytes are a host tensor."""


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes one region (the embedding, a layer, the head) of a run."""

    run: Scene
    tape: Tape
    quantised: dict[int, Value] = field(default_factory=dict)
    spread: dict[str, Value] = field(default_factory=dict)
    copies: dict[str, Value] = field(default_factory=dict)
    repeats: bool = False
    """Are all parameters another region's?"""
    rules: tuple[Rule, ...] = ()
    """Recipes of products that have not the run's."""
    _random: Value | None = None

    @classmethod
    def of(cls, run: Scene) -> Writer:
        """An empty region."""
        return cls(run=run, tape=Tape(mesh=run.layout.mesh_sizes))

    # what was chosen ------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> Kernels:
        """Which ops are one kernel."""
        return self.run.kernels

    @property
    def compute(self) -> str:
        """Dtype of activations."""
        return self.run.precision.compute

    @property
    def products(self) -> str:
        """Dtype of matrix products: under autocast narrower than other ops'. See NOTE [ Autocast ]."""
        return self.run.precision.casts or self.compute

    @property
    def stream(self) -> str:
        """Dtype of the residual stream. What convolutions made of sound stays as narrow as products under autocast,
        unless a norm comes before the first layer that is on its list (`listed`).
        """
        model = self.run.model
        if model.waves is not None and self.run.precision.casts and not (self.listed and model.embedding_norm):
            return self.products
        return "float32" if model.wide_stream else self.compute

    @property
    def listed(self) -> bool:
        """Are ops on autocast's list for fp32 that CUDA alone has there: norms, softmax, powers? NOTE [ Autocast ]."""
        return self.run.precision.casts is not None and self.kernels.device is not Device.CPU

    @property
    def tp(self) -> int:
        """t."""
        return self.run.layout.tp

    @property
    def expert_axis(self) -> str:
        """Which mesh axis shards an expert's width."""
        return "etp" if self.run.layout.splits_tp else "tp"

    @property
    def seq_dim(self) -> int:
        """Which dim of an activation is the sequence."""
        return 1 if self.kernels.batch_first else 0

    # shapes ---------------------------------------------------------------------------------------------------------

    def shape(self, *width: int) -> tuple[int, ...]:
        """(b, s, *width), or (s, b, *width)."""
        b, s = self.run.micro_batch, self.run.seq
        return (b, s, *width) if self.kernels.batch_first else (s, b, *width)

    def inside(self, *more: tuple[str, int]) -> Places:
        """Placement within attention and feed-forward blocks: s over cp, and what is given."""
        cp = (("cp", self.seq_dim),) if self.run.layout.cp > 1 else ()
        return tuple(sorted((*cp, *more)))

    def outside(self) -> Places:
        """Placement between the blocks: under sequence parallelism s is sharded over tp as well."""
        sp = self.run.layout.sp and self.tp > 1
        return self.inside(("tp", self.seq_dim)) if sp else self.inside()

    def on_tp(self, dim: int) -> Places:
        """Placement of an activation inside a block whose ``dim`` is sharded over tp."""
        return self.inside(("tp", dim)) if self.tp > 1 else self.inside()

    # sources --------------------------------------------------------------------------------------------------------

    def hidden(self, role: str = "block input", *, detached: bool = False, depths: int = 1) -> Value:
        """The residual stream as the region is given it. ``detached``: no gradient goes further back.

        ``depths``: hidden states of so many, joined.
        """
        rows = list(self.shape(self.run.model.hidden))
        rows[self.seq_dim] *= depths
        shape = tuple(rows)
        return self.tape.source(role, shape, self.stream, self.outside(), grad=not detached)

    def table(self, name: str, shape: tuple[int, ...], dtype: str, places: Places = ()) -> Value:
        """Something that every layer reads and none pays for."""
        return self.tape.source(name, shape, dtype, places, kind=Source.INPUT, free=True)

    def random(self) -> Value:
        """The state of the random generator where the region starts: masks can be drawn from it again."""
        if self._random is None:
            size = RANDOM_STATE_BYTES[self.kernels.device]
            self._random = self.tape.source("random state", (size,), "uint8", kind=Source.RANDOM)
        return self._random

    def follow(self, other: Writer) -> None:
        """One random state for both, who write on one tape."""
        self._random = other._random

    def parameter(
        self,
        name: str,
        *shape: int,
        split: int | None = None,
        expert: bool = False,
        tied: bool = False,
        product: bool = False,
        head: bool = False,
        adapter: bool = False,
        fixed: bool = False,
        wide: bool = False,
    ) -> Weight:
        """Declare a parameter; ``split`` is the dim that tp shards, ``expert``: ep shards dim 0, which counts experts.

        ``tied``: it is another region's, and is held once more only where a pipeline stage comes between.
        ``product``: it is the matrix of a product; ``head``: of the head's. ``adapter``: it is trained while the others
        are frozen. ``fixed``: the model's own code never trains it. ``wide``: it is held in fp32, whatever others are.
        """
        axis = self.expert_axis if expert else "tp"
        places = [(axis, split)] if split is not None and self.tape.mesh[axis] > 1 else []
        if expert and self.run.layout.ep > 1:
            places.append(("ep", 0))
        frozen = fixed or (self.run.tuning is not None and not adapter)
        packed = copies = 0
        recipe, other = self.recipe, self.other_recipe if product else None
        if recipe is not None and self.narrows(shape[-2] if product else 1, head=head) and not adapter:
            copies = recipe.weight_bytes(self.tape.local_shape(shape, tuple(sorted(places))))
        if frozen and product and not head and not expert and self.base.packed:
            local = self.tape.local_shape(shape, tuple(sorted(places)))
            packed = self.base.packed_bytes(prod(local), local[0])
        return self.tape.weight(
            name,
            shape,
            "float32" if wide else self.held(frozen=frozen),
            tuple(sorted(places)),
            expert=expert,
            tied=tied or self.repeats,
            product=product,
            head=head,
            frozen=frozen,
            packed_bytes=packed,
            wide=wide,
            narrow_bytes=copies,
            adapter=adapter,
            recipe=other,
        )

    def narrows(self, features: int, *, head: bool) -> bool:
        """Is a product with so many results done with narrow copies by a recipe? The head is torch's, as are gates."""
        return self.recipe is not None and features > 1 and not head

    @property
    def other_recipe(self) -> Fp8Recipe | None:
        """Of products here, where that is not the run's."""
        return rule_for(self.rules, self.tape.path) if self.rules else None

    @property
    def recipe(self) -> Fp8Recipe | None:
        """Of products here; None: they are as wide as activations, or the run has none."""
        run, other = self.run.precision.recipe, self.other_recipe
        if run is None or other is None:
            return run
        return None if other == WIDE else other

    @property
    def quantises(self) -> bool:
        """Are products here narrow, without a recipe that says how?"""
        precision = self.run.precision
        return precision.product is not None and precision.recipe is None and self.other_recipe != WIDE

    @property
    def base(self) -> Base:
        """How frozen matrices are held."""
        return Base.PLAIN if self.run.tuning is None else self.run.tuning.base

    def held(self, *, frozen: bool) -> str:
        """Dtype of a parameter; of one that is held in fewer bits, of what it becomes to be read."""
        if frozen:
            return "float32" if self.base is Base.FP32 else self.compute
        return self.run.precision.parameter


def saved(value: Value, role: str, reference: str = "") -> Saved:
    """Short for an entry to be."""
    return Saved(value, role, reference)
