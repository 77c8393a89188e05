//! The functions, filters and methods of chat templates, with a bound on what they make.
//!
//! Every operation that copies or makes text or lists pays for its bytes out of a [`Budget`]; together with the engine's fuel
//! this bounds time and memory of a render, whatever the template does.

use super::python::{self, JsonStyle, Unwritable};
use minijinja::value::{DynObject, Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Stands for `a + b`.
pub(super) const ADD: &str = "+";
/// Stands for `a * b`.
pub(super) const MUL: &str = "*";
/// Stands for `a ~ b`.
pub(super) const CONCAT: &str = "~";
/// Pays for reading a value and hands it on.
pub(super) const CHECKED: &str = "=";
/// As [`CHECKED`], for reading one element or the length: lists cost nothing.
pub(super) const INDEXED: &str = "[";
/// Pays for a value that a filter or call has made, and hands it on.
pub(super) const MADE: &str = "!";
/// As [`CHECKED`], for values that hold others: refuses deep nesting.
pub(super) const KEPT: &str = "==";

/// Bytes of one element of a list.
const ELEMENT_BYTES: usize = 24;
/// Price of an element that is read.
const READ_BYTES: usize = 4;
/// Elements that are paid for together.
const STEP: usize = 16;
/// Nesting of lists and maps that a template may make.
const MAX_NESTING: usize = 32;
/// Elements of a list that is made by repetition.
const MAX_REPEATED: usize = 100_000;
/// Widest indentation or field.
const MAX_WIDTH: usize = 1000;

/// Longest render. The budget ends every render sooner on any machine that is not overloaded.
const MAX_RENDER: Duration = Duration::from_secs(3);

/// Bytes that a render may still make, and the moment it must have ended.
#[derive(Debug)]
pub(super) struct Budget {
    left: AtomicUsize,
    deadline: Instant,
}

/// The budget is spent. The source of an [`Error`], so that it is told from other failures.
#[derive(Debug)]
pub(super) struct Overspent;

/// The template called `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Overspent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the template makes too much text")
    }
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Overspent {}
impl std::error::Error for Raised {}

impl Budget {
    pub(super) fn new(bytes: usize) -> Self {
        Self { left: AtomicUsize::new(bytes), deadline: Instant::now() + MAX_RENDER }
    }

    fn pay(&self, bytes: usize) -> Result<(), Error> {
        let paid = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match paid {
            Ok(_) if Instant::now() < self.deadline => Ok(()),
            _ => Err(overspent()),
        }
    }

    fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    fn pay_for(&self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.pay(value.as_str().map_or(0, str::len)),
            ValueKind::Bytes => self.pay(value.as_bytes().map_or(0, <[u8]>::len)),
            _ => Ok(()),
        }
    }

    /// The elements of a sequence, paid for one by one, so that a lazy one without end is cut short.
    fn collect(&self, value: &Value) -> Result<Vec<Value>, Error> {
        let mut items = Vec::new();
        for item in value.try_iter()? {
            // In steps, for speed.
            if items.len() % STEP == 0 {
                self.pay(STEP * ELEMENT_BYTES)?;
            }
            items.push(item);
        }
        Ok(items)
    }

    /// Refuses values nested beyond [`MAX_NESTING`], and macros, which hide what they hold.
    fn check_nesting(&self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_NESTING {
            return Err(invalid("lists or maps are nested too deeply"));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.pay(ELEMENT_BYTES)?;
                    self.check_nesting(&item, depth + 1)?;
                }
                Ok(())
            }
            // A namespace can be changed later: what holds one could become as deep as it is long.
            ValueKind::Map if value.as_object().is_some_and(is_of_the_engine) => {
                Err(invalid("a namespace, loop or macro cannot be kept in a list, map or namespace"))
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.pay(ELEMENT_BYTES)?;
                    self.check_nesting(&value.get_item(&key)?, depth + 1)?;
                }
                Ok(())
            }
            ValueKind::Plain => {
                Err(invalid("a macro or object of the template cannot be kept in a list, map or namespace"))
            }
            _ => Ok(()),
        }
    }
}

fn overspent() -> Error {
    Error::new(ErrorKind::InvalidOperation, "too much text").with_source(Overspent)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn unwritable(error: Unwritable) -> Error {
    match error {
        Unwritable::TooDeep => invalid("the value is nested too deeply to be printed"),
        Unwritable::TooLong => overspent(),
        Unwritable::NoJson(what) => invalid(format!("tojson: {what} cannot be written as JSON")),
    }
}

/// Installs everything in `environment`.
pub(super) fn install(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    install_operators(environment, budget);
    install_filters(environment, budget);
    let paying = Arc::clone(budget);
    environment.set_formatter(move |out, _, value| {
        let text = match value.as_str() {
            Some(text) => {
                paying.pay(text.len())?;
                return Ok(out.write_str(text)?);
            }
            None => python::str(value, paying.left()).map_err(unwritable)?,
        };
        paying.pay(text.len())?;
        Ok(out.write_str(&text)?)
    });
    let paying = Arc::clone(budget);
    environment.set_unknown_method_callback(move |state, value, method, args| {
        call_method(&paying, state, value, method, args)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(invalid("raise_exception").with_source(Raised(message)))
    });
    environment.remove_global("debug");
    // The engine's own divides without looking.
    environment.add_test("divisibleby", |value: i128, by: i128| -> Result<bool, Error> {
        value.checked_rem(by).map(|rest| rest == 0).ok_or_else(|| invalid(format!("divisibleby {by}")))
    });
}

fn install_operators(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let paying = Arc::clone(budget);
    environment.add_function(ADD, move |a: Value, b: Value| add(&paying, &a, &b));
    let paying = Arc::clone(budget);
    environment.add_function(MUL, move |a: Value, b: Value| multiply(&paying, &a, &b));
    let paying = Arc::clone(budget);
    environment.add_function(CONCAT, move |a: Value, b: Value| concat(&paying, &a, &b));
    let paying = Arc::clone(budget);
    environment.add_function(CHECKED, move |value: Value| checked(&paying, value, READ_BYTES));
    let paying = Arc::clone(budget);
    environment.add_function(INDEXED, move |value: Value| checked(&paying, value, 0));
    let paying = Arc::clone(budget);
    environment.add_function(MADE, move |value: Value| checked(&paying, value, ELEMENT_BYTES));
    let paying = Arc::clone(budget);
    environment.add_function(KEPT, move |value: Value| -> Result<Value, Error> {
        paying.check_nesting(&value, 0)?;
        Ok(value)
    });
}

/// `element_bytes` is the price of each element of a list.
fn checked(budget: &Budget, value: Value, element_bytes: usize) -> Result<Value, Error> {
    if let Some(items) = value.downcast_object_ref::<Vec<Value>>() {
        budget.pay(items.len() * element_bytes)?;
        return Ok(value);
    }
    match value.kind() {
        // Lazy sequences hold what they were made from; a chain of them would be as deep as it is long.
        ValueKind::Seq | ValueKind::Iterable => {
            if value.try_iter().is_err() {
                Ok(value)
            } else {
                Ok(Value::from(budget.collect(&value)?))
            }
        }
        ValueKind::Map if is_namespace(&value) => {
            for key in value.try_iter()? {
                budget.check_nesting(&value.get_item(&key)?, 1)?;
            }
            Ok(value)
        }
        ValueKind::Map => {
            budget.pay(value.len().unwrap_or(0) * element_bytes)?;
            Ok(value)
        }
        _ => {
            budget.pay_for(&value)?;
            Ok(value)
        }
    }
}

/// Objects that are neither lists nor maps of data, though some of them have attributes as maps have.
fn is_of_the_engine(object: &DynObject) -> bool {
    let name = object.type_name();
    ["::Namespace", "::Macro", "::Loop", "::Closure", "::LoopState"].iter().any(|suffix| name.ends_with(suffix))
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A number as Python counts it: `True` is 1.
enum Number {
    Int(i128),
    Float(f64),
}

fn number(value: &Value) -> Option<Number> {
    match value.kind() {
        ValueKind::Bool => Some(Number::Int(i128::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
        ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
        _ => None,
    }
}

fn arithmetic(
    name: &str,
    a: &Value,
    b: &Value,
    int: fn(i128, i128) -> Option<i128>,
    float: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let result = match (number(a), number(b)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            int(a, b).map(|n| i64::try_from(n).map_or(Value::from(n), Value::from))
        }
        (Some(Number::Int(a)), Some(Number::Float(b))) => Some(Value::from(float(a as f64, b))),
        (Some(Number::Float(a)), Some(Number::Int(b))) => Some(Value::from(float(a, b as f64))),
        (Some(Number::Float(a)), Some(Number::Float(b))) => Some(Value::from(float(a, b))),
        _ => {
            return Err(invalid(format!("unsupported operands for {name}: {} and {}", a.kind(), b.kind())));
        }
    };
    result.ok_or_else(|| invalid(format!("the result of {name} is too large a number")))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        budget.pay(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(a) && is_list(b) {
        let mut items = budget.collect(a)?;
        items.append(&mut budget.collect(b)?);
        return Ok(Value::from(items));
    }
    arithmetic("+", a, b, i128::checked_add, |a, b| a + b)
}

fn multiply(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (value, count) = match (repeated(a), repeated(b)) {
        (true, false) => (a, b),
        (false, true) => (b, a),
        _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| a * b),
    };
    let Some(Number::Int(count)) = number(count) else {
        return Err(invalid(format!("unsupported operands for *: {} and {}", a.kind(), b.kind())));
    };
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    if let Some(text) = value.as_str() {
        budget.pay(text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    let items = budget.collect(value)?;
    if items.len().saturating_mul(count) > MAX_REPEATED {
        return Err(overspent());
    }
    budget.pay(items.len() * count * ELEMENT_BYTES)?;
    Ok(Value::from(items.iter().cycle().take(items.len() * count).cloned().collect::<Vec<_>>()))
}

fn concat(budget: &Budget, a: &Value, b: &Value) -> Result<Value, Error> {
    let mut text = python::str(a, budget.left()).map_err(unwritable)?;
    text.push_str(&python::str(b, budget.left()).map_err(unwritable)?);
    budget.pay(text.len())?;
    Ok(Value::from(text))
}

fn install_filters(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    // Nothing in chat templates needs these, and each makes more than it was given.
    for name in ["batch", "slice", "groupby", "pprint", "escape", "e", "safe"] {
        environment.remove_filter(name);
    }
    environment.add_filter("safe", |value: Value| value);
    let paying = Arc::clone(budget);
    environment.add_filter("tojson", move |value: &Value, kwargs: Kwargs| tojson(&paying, value, &kwargs));
    let paying = Arc::clone(budget);
    environment.add_filter("string", move |value: &Value| -> Result<String, Error> {
        python::str(value, paying.left()).map_err(unwritable)
    });
    let paying = Arc::clone(budget);
    environment.add_filter("replace", move |value: &Value, from: &Value, to: &Value, count: Option<i64>| {
        let [value, from, to] = [value, from, to].map(|v| python::str(v, paying.left()).map_err(unwritable));
        replace(&paying, &value?, &from?, &to?, count)
    });
    let paying = Arc::clone(budget);
    environment.add_filter("join", move |value: &Value, separator: Option<&Value>, attribute: Option<&str>| {
        let separator = separator.map_or(Ok(String::new()), |s| python::str(s, paying.left())).map_err(unwritable)?;
        join(&paying, value, &separator, attribute)
    });
    let paying = Arc::clone(budget);
    environment.add_filter("indent", move |text: String, width: Option<Value>, first: Option<bool>, kwargs: Kwargs| {
        let first = kwargs.get::<Option<bool>>("first")?.or(first).unwrap_or(false);
        let blank = kwargs.get::<Option<bool>>("blank")?.unwrap_or(false);
        let width = kwargs.get::<Option<Value>>("width")?.or(width);
        kwargs.assert_all_used()?;
        indent(&paying, &text, width.as_ref(), first, blank)
    });
    environment.add_filter("round", round);
    let paying = Arc::clone(budget);
    environment.add_filter("format", move |text: &str, args: Rest<Value>| {
        check_format(&paying, text, &args)?;
        minijinja::format_filter(minijinja::FormatStyle::Printf, text, &args)
    });
}

fn tojson(budget: &Budget, value: &Value, kwargs: &Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(width) if width.is_none() => None,
        Some(width) => Some(
            width
                .as_usize()
                .filter(|w| *w <= MAX_WIDTH)
                .ok_or_else(|| invalid(format!("tojson: indent is to be a number from 0 to {MAX_WIDTH}")))?,
        ),
    };
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|s| !s.is_none());
    let (item_separator, key_separator) = match separators {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let parts: Vec<Value> = pair.try_iter()?.take(3).collect();
            match parts.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => (item.to_owned(), key.to_owned()),
                _ => return Err(invalid("tojson: separators is to be a pair of strings")),
            }
        }
    };
    let style = JsonStyle {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    python::json(value, &style, budget.left()).map(Value::from).map_err(unwritable)
}

fn replace(budget: &Budget, text: &str, from: &str, to: &str, count: Option<i64>) -> Result<String, Error> {
    let limit = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let found = text.matches(from).take(limit).count();
    budget.pay(text.len().saturating_add(found.saturating_mul(to.len())))?;
    Ok(text.replacen(from, to, limit))
}

fn join(budget: &Budget, value: &Value, separator: &str, attribute: Option<&str>) -> Result<String, Error> {
    let mut joined = String::new();
    for (n, item) in value.try_iter()?.enumerate() {
        let item = attribute.map_or_else(|| Ok(item.clone()), |name| item.get_attr(name))?;
        let item = python::str(&item, budget.left()).map_err(unwritable)?;
        let separator = if n == 0 { "" } else { separator };
        budget.pay(separator.len() + item.len() + 1)?;
        joined.push_str(separator);
        joined.push_str(&item);
    }
    Ok(joined)
}

fn indent(budget: &Budget, text: &str, width: Option<&Value>, first: bool, blank: bool) -> Result<String, Error> {
    let prefix = match width {
        None => " ".repeat(4),
        Some(width) if width.as_str().is_some() => width.as_str().unwrap_or_default().to_owned(),
        Some(width) => match width.as_usize() {
            Some(width) if width <= MAX_WIDTH => " ".repeat(width),
            _ => return Err(invalid(format!("indent: the width is to be a number from 0 to {MAX_WIDTH}"))),
        },
    };
    let lines = text.matches('\n').count() + 1;
    budget.pay(text.len().saturating_add(lines.saturating_mul(prefix.len())))?;
    let mut indented = String::new();
    for (n, line) in text.split('\n').enumerate() {
        if n > 0 {
            indented.push('\n');
        }
        if (n > 0 || first) && (blank || !line.is_empty()) {
            indented.push_str(&prefix);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// Python's `round`, half to even; always a float.
fn round(value: f64, precision: Option<usize>, method: Option<&str>) -> Result<f64, Error> {
    let precision = precision.unwrap_or(0).min(300);
    let scale = 10f64.powi(precision as i32);
    match method.unwrap_or("common") {
        // Printing rounds the exact decimal value half to even.
        "common" => format!("{value:.precision$}").parse().map_err(|_| invalid("round: not a number")),
        "ceil" => Ok((value * scale).ceil() / scale),
        "floor" => Ok((value * scale).floor() / scale),
        other => Err(invalid(format!("round: method {other:?}; there are common, ceil and floor"))),
    }
}

/// Refuses formats with wide fields and pays for all arguments in every field.
fn check_format(budget: &Budget, format: &str, args: &[Value]) -> Result<(), Error> {
    let mut digits = 0;
    for char in format.chars() {
        digits = if char.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > 3 || char == '*' {
            return Err(invalid(format!("format: fields wider than {MAX_WIDTH} are not supported")));
        }
    }
    let fields = format.chars().filter(|c| matches!(c, '%' | '{')).count();
    let mut longest = 0;
    for arg in args {
        longest = longest.max(python::str(arg, budget.left()).map_err(unwritable)?.len());
    }
    budget.pay(format.len().saturating_add(fields.saturating_mul(longest + MAX_WIDTH)))
}

fn call_method(budget: &Budget, state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    match (method, args) {
        ("replace", [from, to, rest @ ..]) if rest.len() < 2 => {
            let (Some(from), Some(to)) = (from.as_str(), to.as_str()) else {
                return Err(invalid("replace: both arguments are to be strings"));
            };
            replace(budget, text, from, to, rest.first().and_then(Value::as_i64)).map(Value::from)
        }
        ("join", [items]) => join(budget, items, text, None).map(Value::from),
        ("count", [what]) if what.as_str() == Some("") => Ok(Value::from(text.chars().count() + 1)),
        ("split", [separator, ..]) if separator.as_str() == Some("") => Err(invalid("split: empty separator")),
        ("removeprefix", [prefix]) => {
            let prefix = prefix.as_str().unwrap_or_default();
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        ("removesuffix", [suffix]) => {
            let suffix = suffix.as_str().unwrap_or_default();
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        ("format", _) => {
            check_format(budget, text, args)?;
            minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}
