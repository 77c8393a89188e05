//! Reading what a library points at.

use npuhal_addon_abi::Str;

/// Something that is not as the interface says.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) field: String,
    pub(super) reason: String,
}

impl Fault {
    pub(super) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }

    /// The same, of entry `index` of a list.
    pub(super) fn within(self, kind: &str, index: usize) -> Self {
        Self { field: format!("{kind} {index}, {}", self.field), ..self }
    }
}

/// The elements at `data`: not null unless there are none, aligned, at most `max`.
///
/// # Safety
/// Where `data` is not null and aligned, `len` elements of type `T` lie there, unchanged during `'a`.
pub(super) unsafe fn array<'a, T>(data: *const T, len: usize, max: usize, field: &str) -> Result<&'a [T], Fault> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Fault::new(field, format!("a null pointer to {len} elements")));
    }
    if len > max {
        return Err(Fault::new(field, format!("{len} elements; at most {max} are taken")));
    }
    if !data.is_aligned() {
        return Err(Fault::new(field, "the address of its elements is not aligned"));
    }
    // SAFETY: not null, aligned, and bounded; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// `text`: UTF-8 of at most `max` bytes.
///
/// # Safety
/// Where its pointer is not null, `text.len` bytes lie there, unchanged during `'a`.
pub(super) unsafe fn text_ref<'a>(text: Str, max: usize, field: &str) -> Result<&'a str, Fault> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { array(text.data, text.len, max, field)? };
    std::str::from_utf8(bytes).map_err(|error| Fault::new(field, format!("it is not UTF-8: {error}")))
}

/// A copy of `text`; as [`text_ref`].
///
/// # Safety
/// As [`text_ref`], during the call.
pub(super) unsafe fn text(text: Str, max: usize, field: &str) -> Result<String, Fault> {
    // SAFETY: the caller's promise.
    unsafe { text_ref(text, max, field) }.map(str::to_owned)
}

/// A name: printable ASCII without spaces, not empty.
pub(super) fn printable(name: &str, field: &str) -> Result<(), Fault> {
    if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Fault::new(
            field,
            format!("{name:?} is no name; wanted printable ASCII characters without spaces"),
        ));
    }
    Ok(())
}

/// A line for people: no control characters.
pub(super) fn line(text: &str, field: &str) -> Result<(), Fault> {
    if text.chars().any(char::is_control) {
        return Err(Fault::new(field, "it has control characters; wanted one line of text"));
    }
    Ok(())
}

/// The size that a struct states for itself.
pub(super) fn size(found: u32, wanted: usize, field: &str) -> Result<(), Fault> {
    if found as usize != wanted {
        return Err(Fault::new(field, format!("it states a size of {found} bytes; wanted {wanted}")));
    }
    Ok(())
}

/// A function that must be there.
pub(super) fn function<F>(function: Option<F>, field: &str) -> Result<F, Fault> {
    function.ok_or_else(|| Fault::new(field, "a null pointer where a function is wanted"))
}

/// A flag.
pub(super) fn flag(value: u32, field: &str) -> Result<bool, Fault> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Fault::new(field, format!("{other}; wanted 0 or 1"))),
    }
}
