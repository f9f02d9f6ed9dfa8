"""What each finding says is wrong, and the lines to write instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """The words of a finding."""

    sentence: str  # what is wrong
    in_a_trial: str  # the lines to write in a `PyTorchTrial`
    in_a_loop: str = ""  # those in a loop of the user's own; the same if empty


_STEP = (
    "self.context.step_optimizer(optimizer, scaler=scaler)\nscaler.update()",
    "scaler.step(optimizer)\nscaler.update()",
)
_CLIP = (
    "def clip(parameters):\n    scaler.unscale_(optimizer)\n"
    "    torch.nn.utils.clip_grad_norm_(parameters, max_norm)\n"
    "self.context.step_optimizer(optimizer, clip_grads=clip, scaler=scaler)",
    "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(parameters, max_norm)\n"
    "scaler.step(optimizer)",
)
_ONE_UPDATE = (
    "for optimizer in optimizers:\n    self.context.step_optimizer(optimizer, "
    "scaler=scaler)\nif (batch_idx + 1) % aggregation_frequency == 0:\n    "
    "scaler.update()",
    "for optimizer in optimizers:  # where a window of micro-batches ends\n"
    "    scaler.step(optimizer)\nscaler.update()  # once, after all of them",
)
_SCALED = (
    "self.context.backward(scaler.scale(loss))",
    "scaler.scale(loss).backward()",
)
_ON_APPLIED = (
    "optimizer.register_step_post_hook(lambda *_: scheduler.step())  # once, not in "
    "each step:\n# the hook runs on applied steps alone, but with fused=True, which "
    "needs determined_amp"
)
_APPLIED = (
    "self.amp.wrap_lr_scheduler(scheduler)  # determined_amp: moves on applied steps "
    f"alone\n# or, with step_mode MANUAL_STEP:\n{_ON_APPLIED}",
    _ON_APPLIED,
)

_CAUSES = (
    "# between unscale_ and the step, every change of gradients that is not linear:\n"
    "# clips by hand, hooks that clamp, weight decay, penalties, noise; each loss is "
    "scaled once"
)

REMEDIES = {
    "no_steps": Remedy(
        "the scaler skips steps that no loss scale explains",
        "with torch.autocast(self.context.device.type, enabled=False):\n"
        "    output = module(inputs.float())  # around what is first not finite\n"
        "# or dtype=torch.bfloat16, which has the range of float32",
        'with torch.autocast("cuda", enabled=False):\n'
        "    output = module(inputs.float())  # around what is first not finite\n"
        "# or dtype=torch.bfloat16, which has the range of float32",
    ),
    "not_finite": Remedy(
        "the training ends with numbers that are not finite",
        "if not loss.isfinite(): look at the batch  # an outlier, or a forward beyond "
        "65504\n# running statistics: keep their module in float32, with enabled=False",
    ),
    "stale_casts": Remedy(
        "the forward uses casts of weights from before a step: autocast keeps them to "
        "its end",
        "for step in steps:\n    with torch.autocast(...):  # one region for each "
        "forward\n        loss = ...",
    ),
    "not_zeroed": Remedy(
        "gradients are not zeroed after a step has used them",
        "leave out auto_zero_grads=False, or call optimizer.zero_grad() after each "
        "step",
        "optimizer.zero_grad()  # after each step, skipped or not",
    ),
    "scales_mixed": Remedy(
        "gradients are multiplied by one scale and divided by another",
        *(
            f"{lines}\noptimizer.zero_grad()  # before its own backward, if another "
            "loss reaches it"
            for lines in _ONE_UPDATE
        ),
    ),
    "unscaled_loss": Remedy(
        "the backward starts at a loss that was not scaled, and the scaler divides its "
        "gradients",
        *_SCALED,
    ),
    "unscaled_twice": Remedy("the gradients are divided by the scale twice", *_CLIP),
    "step_without_scaler": Remedy(
        "the optimizer steps without the scaler, which divides gradients and skips "
        "overflows",
        *_STEP,
    ),
    "step_twice": Remedy("the optimizer steps twice with the same gradients", *_STEP),
    "step_missing": Remedy(
        "no optimizer steps with the gradients of the scaled loss", *_STEP
    ),
    "update_missing": Remedy(
        "scaler.update() is missing, so the second step raises", *_STEP
    ),
    "update_in_window": Remedy(
        "scaler.update() runs between the backward and the step that uses its "
        "gradients",
        *_ONE_UPDATE,
    ),
    "unscale_in_window": Remedy(
        "unscale_ runs before the last micro-batch: later ones are added to it still "
        "scaled",
        "def clip(parameters):  # called where a window of batches ends\n"
        "    scaler.unscale_(optimizer)",
        "if is_last_micro_batch:\n    scaler.unscale_(optimizer)",
    ),
    "no_gradients": Remedy(
        "an optimizer steps whose parameters have no gradients, which GradScaler "
        "refuses",
        "step the optimizers that have gradients in this batch alone",
    ),
    "closure": Remedy(
        "the optimizer computes the loss again in its step, which no loss scale allows",
        "dtype=torch.bfloat16, which needs no scaler, or an optimizer that takes no "
        "closure",
    ),
    "loss_cut_off": Remedy(
        "the loss is cut off from the parameters: it is a new tensor, which knows none "
        "of them",
        "loss = loss_fn(output, labels)  # not torch.tensor(loss...), .item(), "
        ".detach()",
    ),
    "constant_loss": Remedy(
        "the loss of this batch is a constant, which no parameter has a part in",
        "loss = output.sum() * 0.0  # a zero that has the graph; or leave the batch "
        "out",
    ),
    "other_parameters": Remedy(
        "the optimizer holds other parameters than the model that trains",
        "optimizer = Optimizer(model.parameters())  # after .to(), deepcopy and new "
        "layers",
    ),
    "clip_scaled": Remedy(
        "gradients are clipped by norm while they are scaled", *_CLIP
    ),
    "clip_value_scaled": Remedy(
        "gradients are clipped by value while they are scaled",
        *(
            lines.replace("norm_(parameters, max_norm", "value_(parameters, limit")
            for lines in _CLIP
        ),
    ),
    "schedule_on_skipped": Remedy(
        "the learning rate moves on steps that the scaler skips", *_APPLIED
    ),
    "schedule_twice": Remedy(
        "the learning rate moves twice for each step of the optimizer",
        "wrap_lr_scheduler(scheduler, STEP_EVERY_BATCH) or scheduler.step(), not both",
        "one scheduler.step() for each optimizer step",
    ),
    "schedule_per_batch": Remedy(
        "the learning rate moves on every micro-batch, more often than the optimizer "
        "steps",
        "step_mode=LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP",
        "if is_last_micro_batch:\n    scheduler.step()",
    ),
    "schedule_never": Remedy(
        "a scheduler is made and never moves",
        "self.context.wrap_lr_scheduler(scheduler, "
        "LRScheduler.StepMode.STEP_EVERY_BATCH)",
        "scheduler.step()  # after scaler.step(optimizer)",
    ),
    "schedule_not_saved": Remedy(
        "the place of the schedule is not in the checkpoint",
        "self.context.wrap_lr_scheduler(scheduler, LRScheduler.StepMode.MANUAL_STEP)",
    ),
    "scaler_not_saved": Remedy(
        "the scale is not in the checkpoint",
        "self.scaler = self.context.wrap_scaler(GradScaler())  # before wrap_model",
        'checkpoint["scaler"] = '
        'scaler.state_dict()\nscaler.load_state_dict(checkpoint["scaler"])',
    ),
    "empty_scaler_state": Remedy(
        "a disabled scaler is saved as {}, which no enabled one can load",
        "if scaler.is_enabled():\n    self.context.wrap_scaler(scaler)",
    ),
    "resume_fails": Remedy(
        "the checkpoint of this run cannot be resumed",
        "det-amp train YOUR_YAML resumes every trial that it trains",
    ),
    "zero_grad_in_window": Remedy(
        "zero_grad() runs between a backward and its step, and throws the gradients "
        "away",
        "leave zero_grad() out: step_optimizer zeroes where a window ends",
        "optimizer.zero_grad()  # before the first backward of a step, or after the "
        "step",
    ),
    "loss_not_divided": Remedy(
        "the losses of a window are added up, not averaged",
        "self.context.backward(scaler.scale(loss / micro_batches))",
        "scaler.scale(loss / micro_batches).backward()",
    ),
    "loss_divided_twice": Remedy(
        "the loss is divided by the batches of a step, and Determined divides the "
        "gradients again",
        "self.context.backward(scaler.scale(loss))  # step_optimizer averages",
    ),
    "autocast_backward": Remedy(
        "the backward runs under autocast, which torch advises against",
        "with autocast:\n    loss = ...\nself.context.backward(scaler.scale(loss))  # "
        "outside",
        "with autocast:\n    loss = ...\nscaler.scale(loss).backward()  # outside",
    ),
    "autocast_covers_nothing": Remedy(
        "autocast covers nothing of the model: it computes in float32 all the way",
        "with torch.autocast(self.context.device.type, dtype=torch.float16):\n"
        "    loss = loss_fn(self.model(inputs), labels)",
        'with torch.autocast("cuda", dtype=torch.float16):\n'
        "    loss = loss_fn(model(inputs), labels)",
    ),
    "eval_16_bits": Remedy(
        "validation in 16 bits changes the metric",
        "leave autocast out of evaluate_batch",
    ),
    "loss_16_bits": Remedy(
        "the loss is computed in 16 bits",
        "loss = loss_fn(self.model(inputs).float(), labels)",
        "loss = loss_fn(model(inputs).float(), labels)",
    ),
    "penalty_scaled": Remedy(
        "the penalty is computed from gradients that are still multiplied by the scale",
        "gradients = torch.autograd.grad(scaler.scale(loss), inputs, "
        "create_graph=True)\ngradients = [g / scaler.get_scale() for g in gradients]",
    ),
    "half_weights": Remedy(
        "weights are in 16 bits, which lose small updates: autocast wants them in "
        "float32",
        "leave out .half(), .bfloat16() and .to(torch.float16) of the model",
    ),
    "bfloat16_with_scaler": Remedy(
        "bfloat16 has the range of float32: nothing is to be scaled",
        "leave the GradScaler out",
    ),
    "no_loss_scale": Remedy(
        "autocast is in float16 and no loss is scaled: small gradients become 0",
        f"{_SCALED[0]}\n{_STEP[0]}",
        f"{_SCALED[1]}\n{_STEP[1]}",
    ),
    "scaler_made_anew": Remedy(
        "a scaler is made for each step, so the scale is never adapted",
        "self.scaler = self.context.wrap_scaler(GradScaler())  # once, in __init__",
        "scaler = GradScaler()  # once, before the loop",
    ),
    "scale_differs_by_rank": Remedy(
        "the ranks have different scales, and average gradients that were multiplied "
        "differently",
        "GradScaler(init_scale=...) with one value, and scaler.update() on every rank",
    ),
    "nan_hidden": Remedy(
        "nan_to_num hides what is not finite, and the scaler cannot see it",
        "leave nan_to_num out: the scaler skips the step",
    ),
    "synchronisation": Remedy(
        "the host waits for the device in each batch",
        "keep the tensor, and read it every 100 batches: loss.detach()",
    ),
    "tf32": Remedy(
        "TF32 is switched, which changes every float32 product of the process",
        'torch.set_float32_matmul_precision("high")  # once, in your own code, if you '
        "want it",
    ),
    "overflow_hidden": Remedy(
        "an overflow does not reach the scaler, so the step is not skipped",
        "change gradients after scaler.unscale_(optimizer), and keep inf and NaN in "
        "them",
    ),
    "depends_on_scale": Remedy(
        "the weights depend on the loss scale, which must not change anything but "
        "rounding",
        *(f"{_CAUSES}\n{lines}" for lines in _CLIP),
    ),
    "unsafe_to_autocast": Remedy(
        "binary_cross_entropy raises under autocast on a GPU: a probability that 16 "
        "bits round to 0 or 1 has an infinite loss",
        "binary_cross_entropy_with_logits(logits, targets)  # in place of the sigmoid "
        "and this",
    ),
    "beyond_float16": Remedy(
        "a number is beyond float16, which ends at 65504",
        "x.masked_fill(mask, torch.finfo(x.dtype).min)  # in place of a constant such "
        "as -1e9",
    ),
    "mixed_dtypes": Remedy(
        "an operation gets a 16-bit tensor that autocast made and one of another dtype",
        "value.to(other.dtype)  # as in out[rows] = layer(x).to(out.dtype)",
    ),
    "no_16_bit_kernel": Remedy(
        "this device cannot compute an operation in 16 bits (nor can NumPy in "
        "bfloat16)",
        "operation(x.float())",
    ),
    "raised": Remedy("the training raised an error", "see the message"),
}
