"""Completions that a teacher in this process samples, for a student to learn from."""

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from upweight.errors import UserError
from upweight.sampler.in_process import InProcess
from upweight.train.distill.teachers import LocalTeacher
from upweight.train.policy import Policy
from upweight.types import Completions, Prompts, Sampling


@dataclass
class TeacherSampler:
    """Samples with the weights of the run's only teacher."""

    policy: Policy
    kept: InProcess | None = None

    @cached_property
    def teacher(self) -> LocalTeacher:
        """The teacher that samples."""
        teachers = self.policy.teachers
        teacher = None if teachers is None else teachers.by_name.get(None)
        if not isinstance(teacher, LocalTeacher) or self.policy.sharded:
            raise UserError(
                "distill.seq_kd: needs one teacher that is whole in this process: name one, or drop the key."
            )
        return teacher

    def __call__(self, prompts: Prompts, count: int, sampling: Sampling) -> Completions:
        with self.teacher.reference.use(self.policy.model) as model:
            return self._sampler(model).generate(prompts, count, sampling)

    def _sampler(self, model: nn.Module) -> InProcess:
        """Return the sampler, whose checks run once; weights that come from elsewhere may lie at other places later."""
        if self.kept is None or self.teacher.at_once:
            self.kept = InProcess(model, self.policy.tokenizer, engine=self.teacher.engine)
        return self.kept
