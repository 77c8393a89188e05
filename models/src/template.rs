//! Chat templates: conversations to text and to ids.
//!
//! The model's own Jinja template is rendered in the environment that Hugging Face's `apply_chat_template` gives it. A template
//! comes with a file from somewhere: steps, text and nesting of a render are bounded, and nothing outside can be reached.

mod bounds;
mod clock;
mod python;
mod rewrite;
mod seal;
mod zone;

pub use clock::strftime_utc;

use crate::text_error::TextError;
use crate::tokenizer::{Specials, Tokenizer};
use crate::vocabulary::Vocabulary;
use bounds::{Budget, Overspent, Raised};
use minijinja::machinery::{CodeGenerator, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use npuhal_core::stage::TokenId;
use regex::Regex;
use seal::Seal;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;
use zone::Offset;

/// Instructions of the template engine that one render may execute.
const FUEL: u64 = 3_000_000;
/// Longest rendered text, in bytes.
const MAX_OUTPUT_BYTES: usize = 8 << 20;
/// Bytes that one render may make on the way, beside what it makes of the messages.
const BUDGET_BYTES: usize = 64 << 20;
/// Bytes that one render may make for each byte of the messages.
const BUDGET_PER_INPUT_BYTE: usize = 32;
/// Name of the template in the engine.
const NAME: &str = "chat_template";
/// Name of the template for conversations with tools.
const TOOL_USE: &str = "tool_use";
/// Names of the built-in templates, for messages.
const BUILTIN: &str = "ChatML with <|im_start|> and <|im_end|>, Llama 3 with <|start_header_id|>";

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                      '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
                      {% endif %}";
const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + \
                      '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// What is said. Read from a string, from `null`, or from a list of parts of type `text`, which are joined by line breaks.
    #[serde(default, deserialize_with = "content_from_string_or_parts")]
    pub content: Option<String>,
    /// Whatever else the message has: `name`, `tool_calls`, `reasoning_content`.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl ChatMessage {
    /// A message of text.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), extra: Map::new() }
    }
}

/// What a template is rendered from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatInput {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Whether the beginning of an answer is put at the end.
    #[serde(default = "yes")]
    pub add_generation_prompt: bool,
    /// Descriptions of functions the model may call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Value>,
    /// Documents the model may draw on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<Value>,
    /// Further variables of the template, such as `enable_thinking`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub kwargs: Map<String, Value>,
    /// The moment `strftime_now` tells, in UTC; `None` for the system's clock and its local time, which is what Hugging Face's
    /// environment tells.
    #[serde(skip)]
    pub now: Option<SystemTime>,
}

impl ChatInput {
    /// A conversation that the model is to continue with an answer.
    #[must_use]
    pub fn new(messages: Vec<ChatMessage>) -> Self {
        Self { messages, add_generation_prompt: true, tools: None, documents: None, kwargs: Map::new(), now: None }
    }
}

/// Which template is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TemplateSource {
    /// The model's own.
    Model,
    /// The built-in ChatML template, because the model has none and its vocabulary has ChatML's tokens.
    BuiltinChatMl,
    /// The built-in template of Llama 3, because the model has none and its vocabulary has its tokens.
    BuiltinLlama3,
}

impl fmt::Display for TemplateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "the model's own",
            Self::BuiltinChatMl => "built-in ChatML (the model has none)",
            Self::BuiltinLlama3 => "built-in Llama 3 (the model has none)",
        })
    }
}

/// A chat template, checked and ready to render.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    text: String,
    source: TemplateSource,
    bos_token: String,
    eos_token: String,
    /// The template for conversations with tools, where there is another.
    for_tools: Option<Box<Self>>,
}

impl ChatTemplate {
    /// The template of a model, or a built-in one that fits its vocabulary.
    ///
    /// `eos_token` of the template is the vocabulary's; where it has none, that one of the tokens which end a text that the
    /// template names, else the first. A template called `tool_use` is the one for conversations with tools.
    ///
    /// # Errors
    /// [`TextError::NotAChatModel`], or a template that is not valid.
    pub fn from_vocabulary(vocabulary: &Vocabulary) -> Result<Self, TextError> {
        let has = |text: &str| vocabulary.tokens.iter().any(|token| token == text);
        let (text, source) = match &vocabulary.chat_template {
            Some(text) if !text.trim().is_empty() => (text.as_str(), TemplateSource::Model),
            _ if has("<|im_start|>") && has("<|im_end|>") => (CHATML, TemplateSource::BuiltinChatMl),
            _ if has("<|start_header_id|>") && has("<|eot_id|>") => (LLAMA3, TemplateSource::BuiltinLlama3),
            _ => return Err(TextError::NotAChatModel { builtin: BUILTIN }),
        };
        let token = |id: &TokenId| vocabulary.tokens.get(*id as usize).map_or("", String::as_str);
        let named = || vocabulary.eos.iter().map(token).find(|eos| !eos.is_empty() && text.contains(eos));
        let stated = vocabulary.eos_token.as_ref().map(token);
        let eos_token = stated.or_else(named).or_else(|| vocabulary.eos.first().map(token)).unwrap_or_default();
        let bos_token = vocabulary.bos.as_ref().map(token).unwrap_or_default();
        let template = Self::new(text, source, bos_token, eos_token)?;
        Ok(match vocabulary.named_templates.get(TOOL_USE) {
            Some(text) if source == TemplateSource::Model => {
                Self { for_tools: Some(Box::new(Self::new(text, source, bos_token, eos_token)?)), ..template }
            }
            _ => template,
        })
    }

    /// The template for a conversation: another one where there are tools.
    fn suited_to(&self, input: &ChatInput) -> &Self {
        let has_tools = input.tools.as_ref().is_some_and(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        match &self.for_tools {
            Some(template) if has_tools && input.tools != Some(Value::Null) => template,
            _ => self,
        }
    }

    /// The template `text`.
    ///
    /// # Errors
    /// A template that is not valid or uses what chat templates may not: `include`, `import`, `extends`, `block`.
    pub fn new(text: &str, source: TemplateSource, bos_token: &str, eos_token: &str) -> Result<Self, TextError> {
        let template = Self {
            text: without_generation_tags(text)?,
            source,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            for_tools: None,
        };
        rewrite::check_shape(&template.text, WHITESPACE)?;
        template.compile()?;
        Ok(template)
    }

    /// Which template this is.
    #[must_use]
    pub fn source(&self) -> TemplateSource {
        self.source
    }

    /// The template's Jinja.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// What the template refuses ([`TextError::TemplateRaised`]), fails at, or exceeds.
    pub fn render(&self, input: &ChatInput) -> Result<String, TextError> {
        self.suited_to(input).render_values(&Values::new(input)?, input)
    }

    fn render_values(&self, values: &Values, input: &ChatInput) -> Result<String, TextError> {
        let budget = Arc::new(Budget::new(BUDGET_BYTES + BUDGET_PER_INPUT_BYTE * values.len_bytes()));
        let environment = environment(&budget, input.now);
        let mut variables = values.kwargs.as_object().cloned().unwrap_or_default();
        variables.insert("messages".into(), values.messages.clone());
        variables.insert("tools".into(), values.tools.clone());
        variables.insert("documents".into(), values.documents.clone());
        variables.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
        variables.insert("bos_token".into(), self.bos_token.clone().into());
        variables.insert("eos_token".into(), self.eos_token.clone().into());
        let root = minijinja::Value::from_serialize(&variables);

        let (instructions, blocks) = self.compile()?;
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        // A template's odd arithmetic must not take the program down, even where the engine has overlooked it.
        let evaluate = AssertUnwindSafe(|| {
            let vm = Vm::new(&environment);
            vm.eval(&instructions, root, &blocks, &mut output, AutoEscape::None).map(|_| ())
        });
        match catch_unwind(evaluate) {
            Ok(result) => result.map_err(|error| self.failure(&error))?,
            Err(_) => {
                let reason = "the template engine failed on it".to_owned();
                return Err(TextError::TemplateFailed { line: 1, reason, text: self.line(1) });
            }
        }
        if text.len() > MAX_OUTPUT_BYTES {
            return Err(TextError::TemplateLimit { what: "bytes of text", limit: MAX_OUTPUT_BYTES as u64 });
        }
        Ok(text)
    }

    fn compile(&self) -> Result<Compiled<'_>, TextError> {
        let tree = parse(&self.text, NAME, Default::default(), WHITESPACE).map_err(|error| {
            let line = error.line().unwrap_or(1);
            TextError::TemplateSyntax { line, reason: reason(&error), text: self.line(line) }
        })?;
        let tree = rewrite::bounded(&tree).map_err(|refused| TextError::TemplateSyntax {
            line: refused.line,
            reason: format!("{:?} is not available in chat templates", refused.what),
            text: self.line(refused.line),
        })?;
        let mut generator = CodeGenerator::new(NAME, &self.text);
        generator.compile_stmt(&tree);
        Ok(generator.finish())
    }

    fn failure(&self, error: &Error) -> TextError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(this) = cause {
            if let Some(Raised(message)) = this.downcast_ref() {
                return TextError::TemplateRaised { message: message.clone() };
            }
            if this.downcast_ref::<Overspent>().is_some() {
                return TextError::TemplateLimit { what: "bytes of text", limit: BUDGET_BYTES as u64 };
            }
            if this.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
                return TextError::TemplateLimit { what: "steps", limit: FUEL };
            }
            cause = this.source();
        }
        let line = error.line().unwrap_or(1);
        TextError::TemplateFailed { line, reason: reason(error), text: self.line(line) }
    }

    /// Line `number` of the template, cut to what fits a terminal.
    fn line(&self, number: usize) -> String {
        self.text.lines().nth(number.saturating_sub(1)).unwrap_or_default().trim().chars().take(200).collect()
    }
}

/// The ids of a conversation. Control tokens come from the template only: what looks like one in a message's text is encoded as
/// ordinary text, so that no message can end its turn or begin another. A token that the template builds around a role counts
/// as the template's. No bos is added that the template does not write.
///
/// # Errors
/// As [`ChatTemplate::render`] and [`Tokenizer::encode`].
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    input: &ChatInput,
) -> Result<Vec<TokenId>, TextError> {
    let template = template.suited_to(input);
    let mut values = Values::new(input)?;
    let seal = Seal::new(tokenizer, template.text(), values.all())?;
    values.all_mut().for_each(|value| seal.seal_value(value));
    let rendered = template.render_values(&values, input)?;
    let mut ids = Vec::with_capacity(rendered.len() / 4 + 1);
    let mut start = 0;
    for (id, range) in tokenizer.find_added(&rendered).filter(|(id, _)| tokenizer.is_control(*id)) {
        let text = seal.unseal(&rendered[start..range.start]);
        tokenizer.encode_part(&text, Specials::Plain, start == 0, &mut ids)?;
        ids.push(id);
        start = range.end;
    }
    tokenizer.encode_part(&seal.unseal(&rendered[start..]), Specials::Plain, start == 0, &mut ids)?;
    Ok(ids)
}

type Compiled<'a> = (
    minijinja::machinery::Instructions<'a>,
    std::collections::BTreeMap<&'a str, minijinja::machinery::Instructions<'a>>,
);

/// What Hugging Face's environment sets.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

fn environment<'a>(budget: &Arc<Budget>, now: Option<SystemTime>) -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(100);
    bounds::install(&mut environment, budget);
    // One moment for the whole render, looked up where a template asks.
    let moment = OnceLock::new();
    environment.add_function("strftime_now", move |format: &str| {
        let (now, offset) = moment.get_or_init(|| match now {
            Some(now) => (now, Offset::utc()),
            None => {
                let now = SystemTime::now();
                (now, Offset::local(clock::unix(now)))
            }
        });
        clock::strftime(*now, offset, format)
    });
    environment
}

/// Variables of a template that the conversation sets itself.
pub const OWN_VARIABLES: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"];

/// The strings that come from outside, as JSON.
#[derive(Debug)]
struct Values {
    messages: Value,
    tools: Value,
    documents: Value,
    kwargs: Value,
}

impl Values {
    fn new(input: &ChatInput) -> Result<Self, TextError> {
        if let Some(name) = OWN_VARIABLES.into_iter().find(|name| input.kwargs.contains_key(*name)) {
            return Err(TextError::Conversation {
                field: format!("template variable {name:?}"),
                wanted: "a name that the conversation does not set itself",
                found: "it among the additional variables".to_owned(),
            });
        }
        Ok(Self {
            messages: input.messages.iter().map(message_value).collect(),
            tools: input.tools.clone().unwrap_or_default(),
            documents: input.documents.clone().unwrap_or_default(),
            kwargs: Value::Object(input.kwargs.clone()),
        })
    }

    fn all(&self) -> impl Iterator<Item = &Value> + Clone {
        [&self.messages, &self.tools, &self.documents, &self.kwargs].into_iter()
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Value> {
        [&mut self.messages, &mut self.tools, &mut self.documents, &mut self.kwargs].into_iter()
    }

    fn len_bytes(&self) -> usize {
        fn len(value: &Value) -> usize {
            match value {
                Value::String(text) => text.len(),
                Value::Array(items) => items.iter().map(len).sum(),
                Value::Object(map) => map.iter().map(|(key, item)| key.len() + len(item)).sum(),
                Value::Null | Value::Bool(_) | Value::Number(_) => 8,
            }
        }
        self.all().map(len).sum()
    }
}

/// A message as templates see it. Arguments of tool calls that are JSON in a string become the object they spell, as templates
/// expect.
fn message_value(message: &ChatMessage) -> Value {
    let mut value = Map::new();
    value.insert("role".into(), json!(message.role));
    value.insert("content".into(), json!(message.content));
    value.extend(message.extra.clone());
    for call in value.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let object = arguments.as_str().and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
        if let Some(object) = object {
            *arguments = Value::Object(object);
        }
    }
    Value::Object(value)
}

/// `{% generation %}` marks answers for training only.
fn without_generation_tags(text: &str) -> Result<String, TextError> {
    let regex = |pattern| Regex::new(pattern).map_err(|e| TextError::Encode { reason: e.to_string() });
    let opened = regex(r"\{%([-+]?)[ \t]*generation[ \t]*([-+]?)%\}")?.replace_all(text, "{%$1 if true $2%}");
    let closed = regex(r"\{%([-+]?)[ \t]*endgeneration[ \t]*([-+]?)%\}")?.replace_all(&opened, "{%$1 endif $2%}");
    Ok(closed.into_owned())
}

fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn yes() -> bool {
    true
}

fn content_from_string_or_parts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Part {
        r#type: String,
        text: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Content {
        Text(String),
        Parts(Vec<Part>),
    }
    let parts = match Option::<Content>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Content::Text(text)) => return Ok(Some(text)),
        Some(Content::Parts(parts)) => parts,
    };
    let text = |part: Part| match part.text {
        Some(text) if part.r#type == "text" => Ok(text),
        _ => Err(serde::de::Error::custom(format!(
            "content part of type {:?}: only parts of type \"text\"",
            part.r#type
        ))),
    };
    let texts: Vec<String> = parts.into_iter().map(text).collect::<Result<_, _>>()?;
    Ok(Some(texts.join("\n")))
}
