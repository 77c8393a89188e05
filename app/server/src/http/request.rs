//! What a client may ask: every known field is checked, unknown ones are ignored. A field that is `null` counts as absent.

use super::error::ApiError;
use crate::job::{Job, JobInput};
use npuhal_models::sampling::SamplingParams;
use npuhal_models::stop::StopStrings;
use npuhal_models::template::{ChatInput, ChatMessage, OWN_VARIABLES};
use serde_json::{Map, Value};

/// Characters of a message or a prompt at most, unless configured otherwise.
pub const DEFAULT_MAX_CHARS: usize = 32_768;
const MAX_CHOICES: u64 = npuhal_models::generate::MAX_CHOICES as u64;
const MAX_TOP_LOGPROBS: u64 = npuhal_models::logprobs::MAX_TOP_LOGPROBS as u64;
/// Alternatives of a text completion at most, as in OpenAI's interface.
const MAX_TEXT_LOGPROBS: u64 = 5;
const DEFAULT_TEXT_TOKENS: u32 = 16;
const MAX_MESSAGES: usize = 4096;
const MAX_NAME_CHARS: usize = 64;
/// Lists and objects in each other in the variables of a template.
const MAX_KWARGS_DEPTH: usize = 32;

type Body = Map<String, Value>;

/// Which interface a request came over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surface {
    Chat,
    Text,
}

/// A checked request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ask {
    pub(crate) surface: Surface,
    pub(crate) model: Option<String>,
    pub(crate) job: Job,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Alternatives listed with each token; `None` without log probabilities.
    pub(crate) logprobs: Option<u32>,
    /// The prompt is put in front of the text.
    pub(crate) echo: Option<String>,
}

/// Reads the body of a request.
pub(crate) fn parse(surface: Surface, bytes: &[u8], max_chars: usize) -> Result<Ask, ApiError> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        ApiError::bad_body("invalid_json", format!("the request body is not valid JSON ({place})"))
    })?;
    let Value::Object(body) = value else {
        return Err(ApiError::bad_body("invalid_json", "request body must be a JSON object"));
    };
    let model = match given(&body, "model") {
        None => None,
        Some(Value::String(id)) if !id.is_empty() => Some(id.clone()),
        Some(_) => return Err(ApiError::invalid("model", "model must be a non-empty string")),
    };
    let (input, echo) = match surface {
        Surface::Chat => (JobInput::Chat(Box::new(chat_input(&body, max_chars)?)), None),
        Surface::Text => {
            let prompt = prompt(&body, max_chars)?;
            let echo = boolean(&body, "echo")?.unwrap_or(false).then(|| prompt.clone());
            no_suffix(&body)?;
            (JobInput::Text(prompt), echo)
        }
    };
    let max_tokens = max_tokens(&body, surface)?;
    let message = format!("n must be an integer between 1 and {MAX_CHOICES}");
    let choices = integer(&body, "n", 1, MAX_CHOICES, &message)?.unwrap_or(1) as u32;
    if surface == Surface::Text {
        best_of(&body, choices)?;
    }
    let stream = boolean(&body, "stream")?.unwrap_or(false);
    let include_usage = stream_options(&body, stream)?;
    let stop = StopStrings::from_json(body.get("stop").unwrap_or(&Value::Null))
        .map_err(|error| ApiError::invalid("stop", error.to_string()))?;
    let logprobs = logprobs(&body, surface)?;
    let sampling = sampling(&body)?;
    let job = Job {
        input,
        max_tokens,
        choices,
        sampling,
        stop: stop.as_slice().to_vec(),
        logprobs,
        // Set when it is handed over.
        time_limit_ms: 0,
    };
    Ok(Ask { surface, model, job, stream, include_usage, logprobs, echo })
}

fn given<'a>(body: &'a Body, field: &str) -> Option<&'a Value> {
    body.get(field).filter(|value| !value.is_null())
}

fn boolean(body: &Body, field: &'static str) -> Result<Option<bool>, ApiError> {
    match given(body, field) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(ApiError::invalid(field, format!("{field} must be a boolean"))),
    }
}

fn integer(body: &Body, field: &'static str, low: u64, high: u64, message: &str) -> Result<Option<u64>, ApiError> {
    match given(body, field) {
        None => Ok(None),
        Some(value) => match value.as_u64().filter(|number| (low..=high).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::invalid(field, message)),
        },
    }
}

fn max_tokens(body: &Body, surface: Surface) -> Result<Option<u32>, ApiError> {
    let read = |field: &'static str| {
        let message = format!("{field} must be a positive integer");
        let tokens = integer(body, field, 1, u64::MAX, &message)?;
        Ok(tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX)))
    };
    let (old, new) = (read("max_tokens")?, read("max_completion_tokens")?);
    match (old, new) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "max_completion_tokens",
            "max_tokens and max_completion_tokens are mutually exclusive",
        )),
        (None, None) if surface == Surface::Text => Ok(Some(DEFAULT_TEXT_TOKENS)),
        (old, new) => Ok(old.or(new)),
    }
}

fn stream_options(body: &Body, stream: bool) -> Result<bool, ApiError> {
    let field = "stream_options";
    let options = match given(body, field) {
        None => return Ok(false),
        Some(Value::Object(options)) => options,
        Some(_) => return Err(ApiError::invalid(field, "stream_options must be an object")),
    };
    if !stream {
        return Err(ApiError::invalid(field, "stream_options requires stream=true"));
    }
    let known = ["include_usage", "include_obfuscation"];
    if let Some(unknown) = options.keys().find(|key| !known.contains(&key.as_str())) {
        let shown: String = unknown.chars().take(60).collect();
        return Err(ApiError::invalid(field, format!("unsupported stream_options field '{shown}'")));
    }
    for key in known {
        if given(options, key).is_some_and(|value| !value.is_boolean()) {
            return Err(ApiError::invalid(field, format!("stream_options.{key} must be a boolean")));
        }
    }
    Ok(given(options, "include_usage").and_then(Value::as_bool).unwrap_or(false))
}

fn logprobs(body: &Body, surface: Surface) -> Result<Option<u32>, ApiError> {
    let asked = match (given(body, "logprobs"), surface) {
        (None, _) => None,
        (Some(Value::Bool(wanted)), _) => wanted.then_some(0),
        (Some(value), Surface::Text) if value.is_number() => {
            let count = value.as_u64().filter(|count| *count <= MAX_TEXT_LOGPROBS);
            let message = "logprobs must be a boolean, or an integer between 0 and 5";
            Some(count.ok_or_else(|| ApiError::invalid("logprobs", message))? as u32)
        }
        (Some(_), Surface::Chat) => return Err(ApiError::invalid("logprobs", "logprobs must be a boolean")),
        (Some(_), Surface::Text) => {
            let message = "logprobs must be a boolean, or an integer between 0 and 5";
            return Err(ApiError::invalid("logprobs", message));
        }
    };
    let field = "top_logprobs";
    match given(body, field) {
        None => Ok(asked),
        Some(_) if asked.is_none() => Err(ApiError::invalid(field, "top_logprobs requires logprobs=true")),
        Some(value) if value.as_i64().is_none() && value.as_u64().is_none() => {
            Err(ApiError::invalid(field, "top_logprobs must be an integer"))
        }
        Some(value) => match value.as_u64().filter(|count| *count <= MAX_TOP_LOGPROBS) {
            Some(count) => Ok(Some(count as u32)),
            None => Err(ApiError::invalid(field, format!("top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}"))),
        },
    }
}

fn sampling(body: &Body) -> Result<SamplingParams, ApiError> {
    SamplingParams::from_json(body).map_err(|error| {
        let message = error.to_string();
        let param = message.split_whitespace().next().unwrap_or_default().to_owned();
        ApiError::invalid(param, message)
    })
}

fn text_limit(field: &str, what: &str, text: &str, max_chars: usize) -> Result<(), ApiError> {
    // Bytes bound characters; counting is for what is near the limit only.
    if text.len() > max_chars && text.chars().count() > max_chars {
        return Err(ApiError::invalid(field.to_owned(), format!("{what} exceeds {max_chars} characters")));
    }
    Ok(())
}

fn prompt(body: &Body, max_chars: usize) -> Result<String, ApiError> {
    let field = "prompt";
    let invalid = |message: &str| Err(ApiError::invalid(field, message));
    let text = match given(body, field) {
        None => return invalid("prompt is required"),
        Some(Value::String(text)) => text,
        Some(Value::Array(items)) => match items.as_slice() {
            [] => return invalid("prompt must be a non-empty string or array of strings"),
            [Value::String(text)] => text,
            [_] => return invalid("each prompt in array must be a string"),
            _ => return invalid("only a single prompt per request is supported"),
        },
        Some(_) => return invalid("prompt must be a non-empty string or array of strings"),
    };
    if text.is_empty() {
        return invalid("prompt cannot be empty");
    }
    text_limit(field, "prompt", text, max_chars)?;
    Ok(text.clone())
}

fn no_suffix(body: &Body) -> Result<(), ApiError> {
    match given(body, "suffix") {
        None => Ok(()),
        Some(_) => Err(ApiError::invalid("suffix", "suffix is not supported")),
    }
}

fn best_of(body: &Body, choices: u32) -> Result<(), ApiError> {
    match given(body, "best_of") {
        None => Ok(()),
        Some(value) if value.as_u64() == Some(u64::from(choices)) => Ok(()),
        Some(_) => Err(ApiError::invalid("best_of", "best_of is only supported when it equals n")),
    }
}

fn chat_input(body: &Body, max_chars: usize) -> Result<ChatInput, ApiError> {
    let list = match given(body, "messages") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        _ => return Err(ApiError::invalid("messages", "messages must be a non-empty array")),
    };
    if list.len() > MAX_MESSAGES {
        let message = format!("messages has {} entries; at most {MAX_MESSAGES} are taken", list.len());
        return Err(ApiError::invalid("messages", message));
    }
    let messages = list.iter().enumerate().map(|(index, value)| message(index, value, max_chars));
    let mut input = ChatInput::new(messages.collect::<Result<_, _>>()?);
    if let Some(value) = given(body, "chat_template_kwargs") {
        let Value::Object(kwargs) = value else {
            let message = "chat_template_kwargs must be an object";
            return Err(ApiError::invalid("chat_template_kwargs", message));
        };
        if let Some(name) = OWN_VARIABLES.into_iter().find(|name| kwargs.contains_key(*name)) {
            let message = format!("chat_template_kwargs names '{name}', which the conversation sets itself");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        let bytes = serde_json::to_string(kwargs).map_or(usize::MAX, |text| text.len());
        if bytes > max_chars {
            let message = format!("chat_template_kwargs exceeds {max_chars} bytes");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        // In the message to the worker it lies some levels deeper, and readers of JSON have a limit.
        if kwargs.values().any(|value| is_deeper(value, MAX_KWARGS_DEPTH)) {
            let message = format!("chat_template_kwargs is nested in more than {MAX_KWARGS_DEPTH} levels");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        input.kwargs = kwargs.clone();
    }
    Ok(input)
}

/// Whether `value` has more than `levels` lists and objects in each other.
fn is_deeper(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deeper(item, levels - 1)),
        Value::Object(fields) => levels == 0 || fields.values().any(|field| is_deeper(field, levels - 1)),
        _ => false,
    }
}

fn message(index: usize, value: &Value, max_chars: usize) -> Result<ChatMessage, ApiError> {
    let field = format!("messages[{index}]");
    let Value::Object(fields) = value else {
        return Err(ApiError::invalid(field, "each message must be an object"));
    };
    let role = match fields.get("role") {
        // The newer name of the same thing.
        Some(Value::String(role)) if role == "developer" => "system",
        Some(Value::String(role)) if ["system", "user", "assistant"].contains(&role.as_str()) => role,
        Some(Value::String(role)) => {
            let shown: String = role.chars().take(60).collect();
            let message = format!("unsupported message role: {shown}; known are system, developer, user and assistant");
            return Err(ApiError::invalid(format!("{field}.role"), message));
        }
        _ => return Err(ApiError::invalid(format!("{field}.role"), "message role must be a string")),
    };
    let text = content(&field, role, fields.get("content"))?;
    text_limit(&format!("{field}.content"), "message content", &text, max_chars)?;
    let mut message = ChatMessage::new(role, text);
    // Templates look for the thoughts of earlier turns, and for names, under these.
    for (key, limit) in [("reasoning_content", max_chars), ("name", MAX_NAME_CHARS)] {
        match fields.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => {
                text_limit(&format!("{field}.{key}"), key, text, limit)?;
                message.extra.insert(key.to_owned(), text.clone().into());
            }
            Some(_) => return Err(ApiError::invalid(format!("{field}.{key}"), format!("{key} must be a string"))),
        }
    }
    Ok(message)
}

fn content(field: &str, role: &str, value: Option<&Value>) -> Result<String, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid(format!("{field}.content"), message));
    match value {
        Some(Value::String(text)) => Ok(text.clone()),
        None | Some(Value::Null) if role == "assistant" => Ok(String::new()),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for part in parts {
                match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                    (Some("text"), Some(text)) => texts.push(text),
                    (Some("text") | None, _) => {
                        return invalid("content parts must be objects of type 'text' with a string 'text'".to_owned());
                    }
                    (Some(kind), _) => {
                        let shown: String = kind.chars().take(60).collect();
                        return invalid(format!("content parts of type '{shown}' are not supported; use type 'text'"));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
        _ => invalid("message content must be a string or an array of text parts".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Order;
    use crate::worker::frame;

    /// The deepest variables that are taken still reach the worker; what JSON readers refuse there would end it.
    #[test]
    fn nested_variables_do_not_end_a_worker() {
        let ask = |levels: usize| {
            let nested = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
            let body = format!(
                r#"{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{"a":{nested},"b":1}}}}"#
            );
            parse(Surface::Chat, body.as_bytes(), DEFAULT_MAX_CHARS)
        };
        let order = Order::Run { id: 1, job: Box::new(ask(MAX_KWARGS_DEPTH).unwrap().job) };
        let mut bytes = Vec::new();
        frame::write(&mut bytes, &order).unwrap();
        assert_eq!(frame::read::<Order>(&mut bytes.as_slice()).unwrap(), Some(order));
        for levels in [MAX_KWARGS_DEPTH + 1, 100, 120] {
            assert_eq!(ask(levels).unwrap_err().detail.param.as_deref(), Some("chat_template_kwargs"), "{levels}");
        }
        assert_eq!(ask(200).unwrap_err().detail.code, Some("invalid_json"));
    }
}
