//! The library's side of the border: makes the tables of [`npuhal_addon_abi`] from what the crate submitted.
//!
//! Every function here that the host calls catches panics; nothing unwinds over the border.

#![allow(unsafe_code, reason = "the other side of a C interface")]

mod borrow;
mod extension;
mod models;
mod route;
mod session;

use npuhal_addon_abi as abi;
use npuhal_registry::{CommandEntry, EncoderEntry, RouteEntry, inventory};
use std::any::Any;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

struct Table(abi::AddonTable);

// SAFETY: the table and what it points at is leaked and never written to again.
unsafe impl Send for Table {}
// SAFETY: as for Send.
unsafe impl Sync for Table {}

/// What `npuhal_addon_entry` returns; see [`crate::export!`].
///
/// # Safety
/// `host` is null or the table of a host.
#[must_use]
pub unsafe fn entry(host: *const abi::HostTable, name: &'static str, version: &'static str) -> *const abi::AddonTable {
    static TABLE: OnceLock<Table> = OnceLock::new();
    // The host checks the version that is stated here; one of another version may have a table of another shape.
    // SAFETY: the caller's promise; the first field is this in every version.
    let is_known = !host.is_null() && unsafe { (&raw const (*host).abi_version).read() } == abi::ABI_VERSION;
    if !is_known {
        static STATED: abi::AddonTable = empty_table("", "");
        return &raw const STATED;
    }
    guarded(|| &raw const TABLE.get_or_init(|| Table(make_table(name, version))).0).unwrap_or(std::ptr::null())
}

const fn empty_table(name: &'static str, version: &'static str) -> abi::AddonTable {
    abi::AddonTable {
        abi_version: abi::ABI_VERSION,
        size_bytes: size_of::<abi::AddonTable>() as u32,
        name: abi::Str::new(name),
        version: abi::Str::new(version),
        routes: std::ptr::null(),
        routes_len: 0,
        commands: std::ptr::null(),
        commands_len: 0,
        encoders: std::ptr::null(),
        encoders_len: 0,
    }
}

fn make_table(name: &'static str, version: &'static str) -> abi::AddonTable {
    // Submitted in link order; the host's order of equals is by name, so that this one does not matter.
    let routes: Vec<_> = inventory::iter::<RouteEntry>.into_iter().map(|entry| route::table(entry.route)).collect();
    let commands: Vec<_> =
        inventory::iter::<CommandEntry>.into_iter().map(|entry| extension::command_table(entry.command)).collect();
    let encoders: Vec<_> =
        inventory::iter::<EncoderEntry>.into_iter().map(|entry| extension::encoder_table(entry.encoder)).collect();
    let (routes, commands, encoders) = (leak(routes), leak(commands), leak(encoders));
    abi::AddonTable {
        routes: routes.as_ptr(),
        routes_len: routes.len(),
        commands: commands.as_ptr(),
        commands_len: commands.len(),
        encoders: encoders.as_ptr(),
        encoders_len: encoders.len(),
        ..empty_table(name, version)
    }
}

fn leak<T>(list: Vec<T>) -> &'static [T] {
    Box::leak(list.into_boxed_slice())
}

/// Runs `call`; a panic in it becomes its text.
fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic_text(panic.as_ref());
        // What was thrown may panic while it is dropped, and what that throws is not dropped any more.
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(again);
        }
        text
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("it panicked: {}", text.unwrap_or("with a value that is no text"))
}

/// Writes `text` into a sink of the host.
fn write(sink: abi::TextSink, text: &str) {
    if let Some(write) = sink.write {
        // SAFETY: the host's own function and state, during the call it was passed to.
        unsafe { write(sink.state, abi::Str::new(text)) };
    }
}
