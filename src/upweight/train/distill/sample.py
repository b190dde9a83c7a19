"""Completions that a teacher in this process samples, for a student to learn from."""

from dataclasses import dataclass
from functools import cached_property

from upweight.errors import UserError
from upweight.sampler.in_process import InProcess
from upweight.train.distill.teachers import LocalTeacher
from upweight.train.policy import Policy
from upweight.types import Completions, Prompts, Sampling


@dataclass
class TeacherSampler:
    """Samples with the weights of the run's only teacher."""

    policy: Policy

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
            sampler = InProcess(model, self.policy.tokenizer, engine=self.teacher.engine)
            return sampler.generate(prompts, count, sampling)
