//! A model that runs here.

use super::{Figures, Partner, Reply};
use crate::Host;
use crate::args::{GenerationArgs, ModelArgs};
use crate::command::list;
use crate::command::run::{answer, peak_memory_bytes, stats_line, tell_phases};
use crate::error::CliError;
use crate::session::plan;
use crate::suggestion;
use crate::window::fitted_chat;
use npuhal_models::Tokenizer;
use npuhal_models::generate::TextGenerator;
use npuhal_models::prompter::Prompter;
use npuhal_models::sampling::SamplingParams;
use npuhal_models::template::ChatMessage;

pub(super) struct Local<'a> {
    args: &'a GenerationArgs,
    tokenizer: Tokenizer,
    prompter: Prompter,
    generator: TextGenerator,
    /// What the model's authors suggest, where flags leave it open.
    suggested: SamplingParams,
}

impl<'a> Local<'a> {
    /// Loads the model.
    pub(super) fn open(host: &Host, model: &ModelArgs, args: &'a GenerationArgs) -> Result<Self, CliError> {
        let plan = plan(host, model)?;
        let tokenizer = plan.tokenizer(host)?;
        let prompter = Prompter::new(&plan.model, &tokenizer)?;
        let authors = plan.model.suggested_sampling().cloned();
        let generator = TextGenerator::new(plan.open()?);
        let suggested = suggestion::follow(host, authors.as_ref(), args, &generator);
        Ok(Self { args, tokenizer, prompter, generator, suggested })
    }
}

impl Partner for Local<'_> {
    fn answer(&mut self, host: &Host, messages: &[ChatMessage]) -> Result<Reply, CliError> {
        let ids = fitted_chat(host, &self.prompter, self.args, messages, self.generator.positions())?;
        let answer = answer(host, self.args, &mut self.generator, &self.tokenizer, &self.suggested, ids)?;
        tell_phases(host, &self.generator);
        let stats = &answer.stats;
        let figures = Figures {
            line: stats_line(stats),
            tokens: Some(stats.generated_tokens as u64),
            tokens_per_second: stats.decode_tokens_per_second(),
            first_token_seconds: stats.ttft.as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
        };
        Ok(Reply { text: answer.text, reasoning: answer.reasoning, figures })
    }

    fn models(&self, host: &Host) -> Result<String, CliError> {
        list::text(host, false)
    }
}
