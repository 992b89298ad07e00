"""Loops of users' kinds that no example has, as functions that make one: models, optimizer, batch and step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.toys import Mlp

WIDTH, WORDS, ROWS = 32, 64, 128


@dataclass(frozen=True, kw_only=True)
class UsersLoop:
    """A loop.

    Args:
        steps_itself: the step runs the optimizers.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any
    step: Callable[..., Any]
    steps_itself: bool = False

    def run(self) -> None:
        """One step."""
        self.step(*self.models, self.batch)
        if not self.steps_itself:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        return [p for model in self.models for p in model.parameters()]


class Mlps(nn.Module):
    """Residual layers; ``exits``: the head on the output of each of them."""

    def __init__(self, out: int = WIDTH, rate: float = 0.0, *, exits: bool = False) -> None:
        super().__init__()
        self.inp, self.exits = nn.Linear(WIDTH, WIDTH), exits
        self.layers = nn.ModuleList(Mlp(WIDTH, 4 * WIDTH, rate) for _ in range(3))
        self.out = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        x = self.inp(x) if state is None else self.inp(x) + state
        found = []
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            found.append(x)
        return [self.out(one) for one in found] if self.exits else self.out(x)


class Language(nn.Module):
    """A causal transformer, on ids or on their embeddings."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        kind = {"dropout": rate, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor | None = None, embedded: Tensor | None = None) -> Tensor:
        x = self.embed(ids) if embedded is None else embedded
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        out: Tensor = self.head(x)
        return out


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-3)


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def ids() -> Tensor:
    return torch.randint(0, WORDS, (8, 24), generator=torch.Generator().manual_seed(1))


def next_word(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def of_one(model: nn.Module, batch: Any, step: Callable[..., Any]) -> UsersLoop:
    return UsersLoop(models=(model,), optimizers=(adamw(model),), batch=batch, step=step)


def r_drop() -> UsersLoop:
    """Two forwards with other masks, drawn together by a divergence."""

    def step(model: Any, words: Tensor) -> None:
        a, b = model(words), model(words)
        apart = functional.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
        (next_word(a, words) + next_word(b, words) + apart).backward()

    return of_one(Language(), ids(), step)


def sharpness_aware() -> UsersLoop:
    """Weights are moved in place between two backwards, and back."""

    def step(model: Any, batch: Any) -> None:
        (model(batch[0]) - batch[1]).square().mean().backward()
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (size + 1e-12)) for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        model.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)

    return of_one(Mlps(), pair(), step)


def averaged_teacher() -> UsersLoop:
    """BYOL: a copy follows the weights inside of the step."""
    model = Mlps(rate=0.1)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def step(model: Any, teacher: Any, batch: Any) -> None:
        with torch.no_grad():
            told = [teacher(x) for x in batch]
        near = [functional.cosine_similarity(model(x), y).mean() for x, y in zip(batch, told[::-1], strict=True)]
        (-torch.stack(near).sum()).backward()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.01)

    return UsersLoop(models=(model, teacher), optimizers=(adamw(model),), batch=pair(), step=step)


def adversarial() -> UsersLoop:
    """PGD on embeddings: gradients of inputs, then a forward on what they made."""

    def step(model: Any, words: Tensor) -> None:
        embedded = model.embed(words)
        moved = torch.zeros_like(embedded)
        for _ in range(2):
            moved.requires_grad_()
            (slope,) = torch.autograd.grad(next_word(model(embedded=embedded.detach() + moved), words), moved)
            moved = (moved + 0.1 * slope.sign()).detach()
        (next_word(model(words), words) + next_word(model(embedded=model.embed(words) + moved), words)).backward()

    return of_one(Language(rate=0.0), ids(), step)


def mixed_up() -> UsersLoop:
    """A share and an order that are drawn."""

    def step(model: Any, batch: Any) -> None:
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(ROWS)
        x, y = (share * t + (1 - share) * t[order] for t in batch)
        (model(x) - y).square().mean().backward()

    return of_one(Mlps(), pair(), step)


def gradient_cache() -> UsersLoop:
    """Contrastive over the whole batch, by parts that run twice under one random state."""

    def step(model: Any, batch: Any) -> None:
        states, found = [], []
        with torch.no_grad():
            for x in batch[0].chunk(4):
                states.append(torch.get_rng_state())
                found.append(model(x))
        whole = torch.cat(found).requires_grad_()
        functional.cross_entropy(whole @ batch[1].T / 10, torch.arange(ROWS)).backward()
        for x, state, gradient in zip(batch[0].chunk(4), states, whole.grad.chunk(4), strict=True):
            now = torch.get_rng_state()
            torch.set_rng_state(state)
            (model(x) * gradient).sum().backward()
            torch.set_rng_state(now)

    return of_one(Mlps(rate=0.1), pair(), step)


def conflicting_tasks() -> UsersLoop:
    """PCGrad: gradients of each task by `autograd.grad`, put together by hand."""

    def step(model: Any, batch: Any) -> None:
        out, half = model(batch[0]), WIDTH // 2
        losses = [(out[:, :half] - batch[1][:, :half]).square().mean(), (out - batch[1])[:, half:].abs().mean()]
        parameters = list(model.parameters())
        first, second = (torch.autograd.grad(one, parameters, retain_graph=one is losses[0]) for one in losses)
        for parameter, a, b in zip(parameters, first, second, strict=True):
            along = (a * b).sum()
            parameter.grad = torch.where(along < 0, a - along / (b.square().sum() + 1e-9) * b, a) + b

    return of_one(Mlps(), pair(), step)


def diffusion() -> UsersLoop:
    """Times, noise, and conditions that are left out, all drawn."""

    def step(model: Any, batch: Any) -> None:
        time, noise = torch.rand(ROWS, 1), torch.randn_like(batch[0])
        keeps = (torch.rand(ROWS, 1) > 0.1).float()
        out = model(time.cos() * batch[0] + time.sin() * noise, batch[1] * keeps)
        (out - (time.cos() * noise - time.sin() * batch[0])).square().mean().backward()

    return of_one(Mlps(rate=0.1), pair(), step)


def counted_tokens() -> UsersLoop:
    """Uneven micro-batches under one count of tokens."""

    def step(model: Any, words: Tensor) -> None:
        parts = words.split([4, 3, 1])
        count = sum(part[:, 1:].ne(3).sum() for part in parts)
        for part in parts:
            target = part[:, 1:].masked_fill(part[:, 1:].eq(3), -100).flatten()
            logits = model(part)[:, :-1].flatten(0, 1)
            (functional.cross_entropy(logits, target, reduction="sum") / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return of_one(Language(), ids(), step)


def features_by_hooks() -> UsersLoop:
    """Distillation of hidden states that hooks hand out."""
    student, teacher, found = Mlps(), Mlps().requires_grad_(False), {}

    def noted(name: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, out: Tensor) -> None:
            found[name] = out

        return hook

    student.layers[1].register_forward_hook(noted("student"))
    teacher.layers[2].register_forward_hook(noted("teacher"))

    def step(student: Any, teacher: Any, batch: Any) -> None:
        with torch.no_grad():
            told = teacher(batch[0])
        loss = functional.mse_loss(student(batch[0]), told)
        (loss + functional.mse_loss(found["student"], found["teacher"])).backward()
        found.clear()

    return UsersLoop(models=(student, teacher), optimizers=(adamw(student),), batch=pair(), step=step)


def deep_supervision() -> UsersLoop:
    """A loss at every layer."""

    def step(model: Any, batch: Any) -> None:
        torch.stack([(out - batch[1]).square().mean() for out in model(batch[0])]).sum().backward()

    return of_one(Mlps(exits=True), pair(), step)


def updates_inside_of_backward() -> UsersLoop:
    """LOMO: each parameter is updated, and its gradient freed, as soon as that is there."""

    def step(model: Any, batch: Any) -> None:
        def update(parameter: Any) -> None:
            parameter.data.add_(parameter.grad, alpha=-1e-3)
            parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        (model(batch[0]) - batch[1]).square().mean().backward()
        for hook in hooks:
            hook.remove()

    return UsersLoop(models=(Mlps(),), optimizers=(), batch=pair(), step=step)


def centred_gradients() -> UsersLoop:
    """Hooks on weights that change their gradients."""
    model = Mlps()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))

    def step(model: Any, batch: Any) -> None:
        (model(batch[0]) - batch[1]).square().mean().backward()

    return of_one(model, pair(), step)


def actor_and_critic() -> UsersLoop:
    """PPO: the actor steps twice while the critic's graph waits."""
    actor, critic = Mlps(8), Mlps(1)
    first, second = adamw(actor), adamw(critic)

    def step(actor: Any, critic: Any, batch: Any) -> None:
        value = critic(batch[0])[:, 0]
        advantage, old = (batch[1][:, 0] - value).detach(), None
        for _ in range(2):
            chance = actor(batch[0]).log_softmax(-1)[:, 0]
            old = chance.detach() if old is None else old
            ratio = (chance - old).exp()
            first.zero_grad()
            (-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()
            first.step()
        second.zero_grad()
        functional.smooth_l1_loss(value, batch[1][:, 0]).backward()
        second.step()

    return UsersLoop(models=(actor, critic), optimizers=(first, second), batch=pair(), step=step, steps_itself=True)


def own_guesses() -> UsersLoop:
    """Scheduled sampling: a forward without gradients makes a part of the batch."""

    def step(model: Any, words: Tensor) -> None:
        with torch.no_grad():
            guessed = model(words).argmax(-1)
        shifted = torch.cat([words[:, :1], guessed[:, :-1]], 1)
        next_word(model(torch.where(torch.rand(words.shape) < 0.25, shifted, words)), words).backward()

    return of_one(Language(), ids(), step)


def truncated_in_time() -> UsersLoop:
    """A state that is handed on, and cut off at every second part."""

    def step(model: Any, batch: Any) -> None:
        state = torch.zeros(ROWS // 4, WIDTH)
        for number, x in enumerate(batch[0].chunk(4)):
            state = model(x, state)
            if number % 2:
                state.square().mean().backward()
                state = state.detach()

    return of_one(Mlps(), pair(), step)


def scheduled_groups() -> UsersLoop:
    """One function for a whole step: clipping, an optimizer over groups, its schedule."""
    model = Mlps(rate=0.1)
    ends = [*model.inp.parameters(), *model.out.parameters()]
    groups = [{"params": model.layers.parameters(), "lr": 1e-3}, {"params": ends, "weight_decay": 0.1}]
    optimizer = torch.optim.NAdam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=50)

    def step(model: Any, batch: Any) -> None:
        (model(batch[0]) - batch[1]).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return UsersLoop(models=(model,), optimizers=(optimizer,), batch=pair(), step=step, steps_itself=True)


def scaled() -> UsersLoop:
    """A gradient scaler that unscales, looks for infinities and steps."""
    model = Mlps()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(model: Any, batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale((model(batch[0]) - batch[1]).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return UsersLoop(models=(model,), optimizers=(optimizer,), batch=pair(), step=step, steps_itself=True)


QUICK = (scaled, gradient_cache, conflicting_tasks, actor_and_critic)
SLOW = (
    r_drop,
    sharpness_aware,
    averaged_teacher,
    adversarial,
    mixed_up,
    diffusion,
    counted_tokens,
    features_by_hooks,
    deep_supervision,
    updates_inside_of_backward,
    centred_gradients,
    own_guesses,
    truncated_in_time,
    scheduled_groups,
)
