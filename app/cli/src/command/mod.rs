//! One module a command.

pub(crate) mod addon;
pub(crate) mod agree;
pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod chat;
pub(crate) mod convert;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod graph;
pub(crate) mod inspect;
pub(crate) mod inspect_package;
pub(crate) mod kit;
pub(crate) mod kit_import;
pub(crate) mod kit_xdna1;
pub(crate) mod list;
pub(crate) mod pack;
pub(crate) mod parity;
pub(crate) mod pull;
pub(crate) mod rm;
pub(crate) mod routes;
pub(crate) mod run;
pub(crate) mod verify;
