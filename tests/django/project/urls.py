"""The admin and the shop."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from tests.django.shop import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/", views.place),
    path("orders/async/", views.aplace),
]
