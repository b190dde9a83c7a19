"""A reference that is synced with the policy (TR-DPO) and saved in checkpoints."""

from pathlib import Path
from typing import Any

import safetensors.torch
from transformers import TrainerCallback

from upweight.errors import UserError
from upweight.methods.base import ReferenceSync
from upweight.models.reference import Reference

FILE = "reference.safetensors"


class SyncReference(TrainerCallback):
    """Moves the reference towards the policy every `steps` steps; must run before `KeepCheckpoints`."""

    def __init__(self, reference: Reference, sync: ReferenceSync) -> None:
        self.reference = reference
        self.alpha, self.steps = sync.alpha, sync.steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.reference.sync(self.alpha)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tensors = self.reference.state_dict()
        if state.is_world_process_zero:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            safetensors.torch.save_file(plain, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)

    def restore(self, checkpoint: Path) -> None:
        """Restore the reference from a checkpoint."""
        if not (checkpoint / FILE).is_file():
            raise UserError(
                f"sync_ref_model: {checkpoint} has no {FILE}: its run had another reference. Turn it off or begin anew."
            )
        self.reference.load_state_dict(safetensors.torch.load_file(checkpoint / FILE))
